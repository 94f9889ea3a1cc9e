"""llama.cpp through llama-cpp-python's low-level API, measured as llama-batched-bench does.

Random token ids are fed in prefill and decode; nothing is sampled, which costs less than any real use.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence

import llama_cpp.llama_cpp as llama
import numpy as np
from llama_cpp import __version__
from peer import Load, Options, Peer, Setting

BATCH_TOKENS = 2048  # of one llama_decode, the default of llama.cpp's programs
LOG_LEVEL_ERROR = 4


def _log_errors(level: int, text: bytes, _: object) -> None:
    if level == LOG_LEVEL_ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


_LOG_CALLBACK = llama.llama_log_callback(_log_errors)  # llama.cpp keeps no reference to it


class LlamaCppPeer(Peer):
    settings = tuple(
        {"flash_attn": flash_attn, "kv_unified": kv_unified}
        for flash_attn, kv_unified in itertools.product((False, True), (False, True))
    )

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rng = np.random.default_rng(options.seed)
        self._load: Load | None = None
        self._contexts: dict[tuple[object, ...], _Context] = {}
        llama.llama_log_set(_LOG_CALLBACK, None)
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(options.model.encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {options.model}")

    def version(self) -> str:
        features = (word.split(" = ")[0] for word in llama.llama_print_system_info().decode().split(" | "))
        return f"llama.cpp in llama-cpp-python {__version__} ({' '.join(features).strip()})"

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        params = llama.llama_context_default_params()
        params.n_ctx = len(prompt) + num_tokens
        params.n_threads = params.n_threads_batch = self._options.threads
        context = llama.llama_init_from_model(self._model, params)
        token_ids: list[int] = []
        batch = list(prompt)
        for _ in range(num_tokens):
            array = (llama.llama_token * len(batch))(*batch)
            if llama.llama_decode(context, llama.llama_batch_get_one(array, len(batch))) != 0:
                raise RuntimeError(f"llama_decode of {len(batch)} tokens failed")
            logits = llama.llama_get_logits_ith(context, -1)
            batch = [int(np.ctypeslib.as_array(logits, (self._options.vocab_size,)).argmax())]
            token_ids += batch
        llama.llama_free(context)
        return token_ids

    def measure(self, load: Load, setting: Setting) -> tuple[float, float]:
        if load != self._load:
            for context in self._contexts.values():
                context.close()
            self._contexts.clear()
            self._load = load
        key = tuple(setting.values())
        if key not in self._contexts:
            self._contexts[key] = _Context(self._model, self._options, load, setting, self._rng)
        return self._contexts[key].measure()


class _Context:
    """A llama_context made for one load and setting."""

    def __init__(
        self,
        model: llama.llama_model_p,
        options: Options,
        load: Load,
        setting: Setting,
        rng: np.random.Generator,
    ) -> None:
        self._load = load
        self._rng = rng
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._window = llama.llama_model_n_swa(model)
        params = llama.llama_context_default_params()
        length = load.depth + load.prompt_len + load.gen_len + 1
        params.n_ctx = load.batch_size * (-(-length // 256) * 256)
        params.n_batch = max(BATCH_TOKENS, options.step_tokens)
        params.n_ubatch = options.step_tokens
        params.n_seq_max = load.batch_size
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = (
            llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if setting["flash_attn"]
            else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = bool(setting["kv_unified"])
        params.swa_full = False  # as llama.cpp's programs have it
        params.type_k = params.type_v = llama.GGML_TYPE_F16
        params.no_perf = True
        self._batch_tokens = params.n_batch
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context of {params.n_ctx} tokens with {dict(setting)}")
        self._memory = llama.llama_get_memory(self._context)
        self._warm_up()

    def close(self) -> None:
        llama.llama_free(self._context)

    def measure(self) -> tuple[float, float]:
        load = self._load
        everyone = range(load.batch_size)
        self._restore_depth()
        copied = load.shared_prefix if load.copy_prefix else 0
        first = self._prompt_batches(load.depth, copied, [0])
        rest = self._prompt_batches(load.depth + copied, load.prompt_len - copied, everyone)
        step = self._batch([(load.depth + load.prompt_len, sequence, True) for sequence in everyone])
        positions = np.ctypeslib.as_array(step.pos, (load.batch_size,))
        start = time.perf_counter()
        self._decode(first)
        if copied:
            self._copy_first_sequence()
        self._decode(rest)
        middle = time.perf_counter()
        for _ in range(load.gen_len):
            self._decode([step])
            positions += 1
        end = time.perf_counter()
        for batch in (*first, *rest, step):
            llama.llama_batch_free(batch)
        return middle - start, end - middle

    def _warm_up(self) -> None:
        """Touches the memory of a full step and of a decode step."""
        everyone = range(self._load.batch_size)
        self._run(self._prompt_batches(0, self._load.prompt_len, everyone)[:1])
        llama.llama_memory_clear(self._memory, True)
        self._run([self._batch([(0, sequence, True) for sequence in everyone])])
        llama.llama_memory_clear(self._memory, True)

    def _restore_depth(self) -> None:
        """Leaves depth tokens of context in every sequence and nothing else."""
        depth, count = self._load.depth, self._load.batch_size
        if depth and all(self._cut(sequence) for sequence in range(count)):
            return
        llama.llama_memory_clear(self._memory, False)
        if not depth:
            return
        if self._load.copy_prefix and self._load.shared_prefix:
            self._run(self._prompt_batches(0, depth, [0]))
            self._copy_first_sequence()
        else:
            self._run(self._prompt_batches(0, depth, range(count)))

    def _cut(self, sequence: int) -> bool:
        """Drops what follows the context; False if it is not all there, as behind a sliding window."""
        depth = self._load.depth
        oldest_needed = max(0, depth - self._window) if self._window else 0
        llama.llama_memory_seq_rm(self._memory, sequence, depth, -1)
        first = llama.llama_memory_seq_pos_min(self._memory, sequence)
        last = llama.llama_memory_seq_pos_max(self._memory, sequence)
        return bool(0 <= first <= oldest_needed and last == depth - 1)

    def _copy_first_sequence(self) -> None:
        for sequence in range(1, self._load.batch_size):
            llama.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def _prompt_batches(self, start: int, count: int, sequences: Sequence[int]) -> list[llama.llama_batch]:
        """Batches with positions [start, start + count) of each sequence; its last token gets logits."""
        entries = [(start + i, sequence, i == count - 1) for sequence in sequences for i in range(count)]
        size = self._batch_tokens
        return [self._batch(entries[i : i + size]) for i in range(0, len(entries), size)]

    def _batch(self, entries: Sequence[tuple[int, int, bool]]) -> llama.llama_batch:
        """A batch of random tokens, each with its position, sequence, and whether it gets logits."""
        batch = llama.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        token_ids = self._rng.integers(self._vocab_size, size=len(entries)).tolist()
        for i, (position, sequence, wants_logits) in enumerate(entries):
            batch.token[i] = token_ids[i]
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants_logits
        return batch

    def _decode(self, batches: Sequence[llama.llama_batch]) -> None:
        for batch in batches:
            status = llama.llama_decode(self._context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode of {batch.n_tokens} tokens failed with status {status}")
            llama.llama_synchronize(self._context)

    def _run(self, batches: Sequence[llama.llama_batch]) -> None:
        self._decode(batches)
        for batch in batches:
            llama.llama_batch_free(batch)
