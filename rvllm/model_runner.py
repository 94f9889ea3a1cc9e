"""Loads the weights, sizes the KV cache, and turns a scheduled step into one native call."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from rvllm import _batch, _core
from rvllm.block_manager import BlockTables, KVGroup
from rvllm.config import EngineConfig, ModelConfig
from rvllm.cuda import cublas_libraries, import_cuda
from rvllm.gguf_file import GGUFError, GGUFFile, printable
from rvllm.kv_groups import KVGroupSizes
from rvllm.metal import import_metal, kernel_library
from rvllm.profile import Profile
from rvllm.request import Request, SampledToken
from rvllm.sampling_params import SamplingParams
from rvllm.system import available_cpus, available_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("rvllm")

_DEFAULT_KV_CACHE_BYTES = 4 << 30
_DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
_MAX_CUDA_GRID = 65_535  # blocks along y
_F32 = 0  # ggml's type id


class ModelRunner:
    """One model on one device. Not thread-safe: one call at a time."""

    def __init__(self, gguf: GGUFFile, model_config: ModelConfig, config: EngineConfig):
        """Loads every weight and reserves the KV cache.

        Raises GGUFError naming a tensor that is missing, misshapen or unsupported, and ValueError for a device, ISA or
        cache size that cannot be had.
        """
        if config.device.startswith("cuda"):
            _check_cuda_grid(config.max_num_batched_tokens, model_config)
        device = _make_backend(config)
        self.profile = Profile(device) if config.profile else None
        self.backend = device if self.profile is None else self.profile.backend
        self.vocab_size = model_config.vocab_size
        self._hidden_size = model_config.hidden_size
        self._pooling = model_config.pooling
        self.block_size = config.block_size
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self._model = _load_model(self.backend, gguf, model_config, config.dtype)
        kv_type = getattr(_core.KVType, config.kv_cache_dtype)
        windows = self._model.windows
        block_bytes = [
            self._model.kv_cache_bytes(group, 1, config.block_size, kv_type) for group in range(len(windows))
        ]
        self.kv_bytes_per_block = sum(block_bytes)
        sizes = KVGroupSizes(
            windows,
            block_bytes,
            config.block_size,
            config.max_model_len or model_config.context_length,
            config.max_num_seqs,
            config.max_num_batched_tokens,
        )
        self.kv_groups = _choose_kv_groups(sizes, config, device)
        num_blocks = [group.num_blocks for group in self.kv_groups]
        self._model.alloc_kv_cache(num_blocks, config.block_size, kv_type)
        if self.profile is not None:
            self.profile.reset()  # threads have repacked weights

    def make_pooler(self, num_tokens: int) -> _core.Pooler:
        """State from which a prompt of num_tokens is embedded. Raises ValueError where the model cannot be pooled."""
        return _core.Pooler(self._pooling, self._hidden_size, num_tokens)

    def make_sampler(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Iterable[int],
        seed: int,
        index: int,
    ) -> _core.Sampler:
        """State from which one request samples; stop_token_ids are not sampled before params.min_tokens."""
        return _core.Sampler(
            vocab_size=self.vocab_size,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, min(params.top_k, self.vocab_size)),
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=seed,
            index=index,
            min_tokens=params.min_tokens,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_token_ids=list(prompt_token_ids) if params.repetition_penalty != 1 else [],
            stop_token_ids=sorted(stop_token_ids),
            logit_bias=list((params.logit_bias or {}).items()),
        )

    def run(self, scheduled: list[tuple[Request, int]]) -> list[SampledToken]:
        """Computes the next num_tokens of each request; returns a token (or an embedding, or an error) for each request
        that has reached its last known one, in order. Prompt log-probabilities go to the requests."""
        arrays, requests, readers, pooled = _batch.fill(scheduled, self.block_size)
        grammars = [
            (request.sampler, request.grammar)
            for request, reader in zip(requests, readers, strict=True)
            if request.grammar is not None and reader is request.sampler
        ]
        for _, grammar in grammars:
            grammar.prepare()  # on other threads, while the forward pass runs

        def constrain() -> None:
            for sampler, grammar in grammars:
                sampler.set_allowed(grammar.allowed())

        with self._timed(len(scheduled), len(arrays[0])):
            rows = self._model.step(
                _core.StepArrays(*arrays), readers, pooled, constrain if grammars else None
            )
        results: dict[Request, SampledToken] = {}
        for request, (token_id, entries, error) in zip(requests, rows, strict=True):
            logprobs = None if entries is None else {i: (p, rank) for i, p, rank in entries}
            if (
                request.prompt_logprobs is not None
                and len(request.prompt_logprobs) < request.num_prompt_tokens
            ):
                request.prompt_logprobs.append(logprobs)
                request.error = request.error or error
            else:
                if error is not None and request.grammar is not None:
                    error = request.grammar.error or error
                results[request] = SampledToken(token_id, logprobs, request.error or error)
        for request, count in scheduled:
            if request.pooler is not None and request.num_computed_tokens + count == request.num_tokens:
                results[request] = _embedding(request.pooler)
        return [results[request] for request, _ in scheduled if request in results]

    def get_logits(
        self, token_ids: Sequence[int], start: int, block_tables: BlockTables, first: int
    ) -> NDArray[np.float32]:
        """One step for token_ids, at the positions from start on: logits [rows, vocab_size] of those from `first` on.

        block_tables hold the tokens before, and have room for these.
        """
        count = len(token_ids)
        positions = np.arange(start, start + count, dtype=np.int32)
        tables = np.array(
            [table[: -(-(start + count) // self.block_size)] for table in block_tables], np.int32
        )
        slots = tables[:, positions // self.block_size] * self.block_size + positions % self.block_size
        arrays = _core.StepArrays(
            np.asarray(token_ids, np.int32),
            positions,
            slots,
            np.array([0, count], np.int32),
            np.array([start + count], np.int32),
            tables[:, None, :],
            np.arange(max(first - start, 0), count, dtype=np.int32),
        )
        with self._timed(1, count):
            return self._model.logits(arrays)

    def _timed(self, num_requests: int, num_tokens: int) -> AbstractContextManager[None]:
        """Around a native call."""
        return nullcontext() if self.profile is None else self.profile.native_call(num_requests, num_tokens)


def _choose_kv_groups(sizes: KVGroupSizes, config: EngineConfig, device: _core.Backend) -> list[KVGroup]:
    available, budget = _memory(device, config)
    if config.num_blocks is not None:
        groups = sizes.for_blocks(config.num_blocks)
    elif config.kv_cache_memory is not None:
        groups = sizes.for_bytes(config.kv_cache_memory)
        if groups[0].num_blocks == 0:
            raise ValueError(
                f"kv_cache_memory of {config.kv_cache_memory} bytes is less than one block of "
                f"{sum(sizes.block_bytes)} bytes"
            )
    else:
        # Enough for every request at full length, within a share of the memory that leaves room for others.
        most = sizes.for_blocks(config.max_num_seqs * -(-sizes.max_model_len // sizes.block_size))
        groups = (
            most if sizes.num_bytes(most) <= budget else sizes.for_bytes(max(budget, sum(sizes.block_bytes)))
        )
    num_blocks, needed = groups[0].num_blocks, sizes.num_bytes(groups)
    if needed > available:
        raise ValueError(f"a KV cache of {num_blocks} blocks needs {needed} bytes, {available} are available")
    if num_blocks * sizes.block_size >= 2**31:
        raise ValueError(f"{num_blocks} blocks of {sizes.block_size} tokens are more than 2^31 slots")
    return groups


def _embedding(pooler: _core.Pooler) -> SampledToken:
    try:
        return SampledToken(-1, embedding=pooler.embedding())
    except RuntimeError as error:
        return SampledToken(-1, error=str(error))


def _make_backend(config: EngineConfig) -> _core.Backend:
    """Raises ValueError and RuntimeError that say what a device or its backend lacks."""
    available = available_cpus()
    num_threads = available if config.num_threads is None else config.num_threads
    if num_threads > available:
        logger.warning(
            "num_threads %d is more than the %d processors available; using %d",
            num_threads,
            available,
            available,
        )
        num_threads = available
    if config.device == "cpu":
        return _core.CpuBackend(num_threads, config.isa or "")
    backend: _core.Backend
    if config.device == "metal":
        backend = import_metal().make_backend(
            num_threads, kernel_library(), f16_prefill=config.prefill_compute == "f16"
        )
        return backend
    backend = import_cuda().make_backend(
        num_threads,
        cublas_libraries(),
        device=int(config.device.partition(":")[2] or 0),
        f16_prefill=config.prefill_compute == "f16",
    )
    return backend


def _check_cuda_grid(max_num_batched_tokens: int, model_config: ModelConfig) -> None:
    """Rows of a product are taken 8 at a time, those of each expert apart, by at most 65,535 blocks."""
    rows = 8 * _MAX_CUDA_GRID - 7 - 7 * model_config.num_experts
    most = rows // max(1, model_config.num_experts_per_tok)
    if max_num_batched_tokens > most:
        raise ValueError(
            f"max_num_batched_tokens must be at most {most} on cuda for this model, not {max_num_batched_tokens}"
        )


def _memory(device: _core.Backend, config: EngineConfig) -> tuple[int, int]:
    """Bytes that are free where the KV cache goes, and how many of them it takes by default."""
    if config.device == "cpu":
        available = available_memory() // config.num_replicas
        return available, min(_DEFAULT_KV_CACHE_BYTES, available // 2)
    available, total = device.memory_info  # type: ignore[attr-defined]  # of a GPU's
    utilization = config.gpu_memory_utilization or _DEFAULT_GPU_MEMORY_UTILIZATION
    budget = max(0, available - int((1 - utilization) * total))
    if config.device == "metal" and config.gpu_memory_utilization is None:
        budget = min(budget, _DEFAULT_KV_CACHE_BYTES)  # a Mac's programs share its memory
    return available, budget


def _load_model(backend: _core.Backend, gguf: GGUFFile, config: ModelConfig, dtype: str) -> _core.Model:
    """Hands the file's tensors to the backend, and gives their pages back as they are packed."""
    unused = {name for name in gguf.tensors if not _is_read_elsewhere(name, config)}
    dequantized: dict[str, NDArray[np.float32]] = {}  # tensors the backend has not packed to their end
    if dtype == "float32":
        needed = 4 * sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
        if needed > available_memory():
            raise ValueError(
                f"dtype 'float32': the weights need {needed} bytes, {available_memory()} are available"
            )

    def find(name: str) -> tuple[int, int, int, NDArray[np.uint8 | np.float32]] | None:
        tensor = gguf.tensors.get(name)
        if tensor is None:
            return None
        unused.discard(name)
        if name.endswith("_exps.weight"):
            num_experts = tensor.shape[0] if len(tensor.shape) == 3 else 1  # writers drop a dimension of 1
            if num_experts != config.num_experts:
                raise GGUFError(
                    f"{gguf.path}: {name}: of {num_experts} experts, expected {config.num_experts}"
                )
        elif len(tensor.shape) not in (1, 2):
            raise GGUFError(f"{gguf.path}: {name}: {len(tensor.shape)} dimensions, expected 1 or 2")
        if not _core.supports_type(tensor.type_id):
            raise GGUFError(
                f"{gguf.path}: {name}: type {tensor.type.name} ({tensor.type_id}) is not supported"
            )
        rows, cols = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        if dtype == "float32" and tensor.type_id != _F32:
            if name not in dequantized:
                dequantized[name] = _core.dequantize(tensor.type_id, tensor.data)
            return _F32, rows, cols, dequantized[name]
        return tensor.type_id, rows, cols, tensor.data

    def consumed(name: str, num_bytes: int) -> None:
        if name not in dequantized:
            gguf.release(gguf.tensors[name], num_bytes)
        elif num_bytes == dequantized[name].nbytes:
            del dequantized[name]
            gguf.release(gguf.tensors[name], gguf.tensors[name].data.size)

    try:
        model = _core.Model(backend, asdict(config), find, consumed)
    except GGUFError:
        raise
    except ValueError as error:
        raise GGUFError(f"{gguf.path}: {error}") from None
    if unused:  # an overlooked bias or scale would make every answer wrong
        name, more = min(unused), f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
        used = sorted(set(gguf.tensors) - unused, key=lambda name: (name.startswith("blk."), name))
        known = ", ".join(n for n in used if not re.match(r"blk\.(?!0\.)", n))
        raise GGUFError(
            f"{gguf.path}: {printable(name)}{more}: {config.architecture} models with such a tensor are not "
            f"supported; supported: {printable(known)}"
        )
    _check_layers_alike(gguf, config)
    return model


def _check_layers_alike(gguf: GGUFFile, config: ModelConfig) -> None:
    """A bias or a gate that other layers have is missing, not absent: without it every answer would be wrong."""
    layers: dict[int, set[str]] = {}
    networks: dict[bool, set[str]] = {False: set(), True: set()}  # tensors of dense layers, and of the others
    names: set[str] = set()
    for name in gguf.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match and not _is_read_elsewhere(name, config):
            layer = int(match[1])
            layers.setdefault(layer, set()).add(match[2])
            is_network = re.match(r"ffn_(gate|up|down)|exp_probs", match[2])
            (networks[layer < config.first_k_dense_replace] if is_network else names).add(match[2])
    for layer, found in sorted(layers.items()):
        missing = (names | networks[layer < config.first_k_dense_replace]) - found
        if missing:
            name = f"blk.{layer}.{min(missing)}"
            raise GGUFError(f"{gguf.path}: {printable(name)}: tensor is missing, other layers have one")
    if "attn_norm.bias" in names and "output_norm.bias" not in gguf.tensors:
        raise GGUFError(f"{gguf.path}: output_norm.bias: tensor is missing, the layers' norms have one")


def _is_read_elsewhere(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is part of the config, or says nothing of the next token that the config does not."""
    block = re.match(r"blk\.(\d+)\.", name)
    if block is not None and int(block[1]) >= config.num_layers:
        return True  # of a layer that predicts tokens further ahead
    return (
        re.fullmatch(
            r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight",
            name,
        )
        is not None
    )
