"""LLM: the offline API. One model, many prompts, answers in order."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from rvllm.chat_template import ChatTemplate, ChatTemplateError
from rvllm.config import EngineConfig, ModelConfig
from rvllm.engine import LLMEngine
from rvllm.gguf_file import GGUFFile
from rvllm.model_runner import ModelRunner
from rvllm.models import resolve_model
from rvllm.profile import ProfiledEngine
from rvllm.request import RequestOutput
from rvllm.request_group import RequestGroup
from rvllm.sampling_params import SamplingParams
from rvllm.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Prompt: TypeAlias = "str | list[int]"
Message: TypeAlias = Mapping[str, Any]

FEW_PROMPTS = 4  # no progress bar up to here


class LLM:
    """Loads a GGUF model and answers prompts. Several threads may call it: their requests run together.

    model: a path, a name or source that `rvllm pull` takes, or None for the default model.
    tokenizer: a tokenizer.json to use instead of the one in the model file.
    dtype: "auto" computes on the weights as they are in the file, "float32" on the same dequantized: slow, large,
    and what accuracy is measured against.
    max_model_len: most tokens of prompt and answer together; None: what the model was trained for.
    max_num_seqs: requests that run at a time. max_num_batched_tokens: tokens computed in one step.
    num_blocks (for layers that see all tokens), kv_cache_memory (bytes): size of the KV cache; None: from free memory.
    kv_cache_dtype: f16, f32, bf16 or q8_0 (half the memory of f16, at some loss).
    gpu_memory_utilization: share of a GPU's memory that weights and the KV cache take together; None: 0.9.
    num_replicas: processes like this one on the machine, which share its free memory out equally.
    prefill_compute: auto, int8, or on cuda f16: cuBLAS multiplies steps of many tokens, faster, but a request's numbers
    then depend on how many tokens are computed beside it.
    num_threads: None: the processors this process may use.
    isa: scalar, avx2, avx_vnni, avx512_vnni, amx, neon or neon_i8mm; None: $RVLLM_ISA, else the machine's best.
    seed: from which requests without a seed of their own get theirs; None: a random one.
    profile: time every operation; LLM.profile then has table() and write_trace().

    Raises ModelError (no such model), GGUFError and TokenizerError (a bad file; both are ValueErrors), and
    ValueError for a setting that is out of range or cannot be had.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        kv_cache_dtype: str = "f16",
        gpu_memory_utilization: float | None = None,
        num_replicas: int = 1,
        prefill_compute: str = "auto",
        enable_prefix_caching: bool = True,
        num_threads: int | None = None,
        isa: str | None = None,
        seed: int | None = None,
        profile: bool = False,
    ) -> None:
        engine_config = EngineConfig(
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            num_replicas=num_replicas,
            prefill_compute=prefill_compute,
            enable_prefix_caching=enable_prefix_caching,
            num_threads=num_threads,
            isa=isa,
            seed=seed,
            profile=profile,
        )
        with GGUFFile(resolve_model(model)) as gguf:
            model_config = ModelConfig.from_gguf(gguf, max_model_len)
            self.tokenizer = _load_tokenizer(gguf, tokenizer, model_config.vocab_size)
            self.chat_template = ChatTemplate.from_gguf(gguf.metadata, self.tokenizer)
            runner = ModelRunner(gguf, model_config, engine_config)
        self.profile = runner.profile
        arguments = (model_config, engine_config, self.tokenizer, runner)
        self.engine = (
            LLMEngine(*arguments) if self.profile is None else ProfiledEngine(*arguments, self.profile)
        )
        self._request_numbers = itertools.count()
        self._lock = threading.Lock()  # held while the engine is used
        self._abandoned: deque[str] = deque()  # requests to abort when it is free

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        arrival_steps: Sequence[int] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts (text or token ids), all of them at a time; results are in the order of the prompts.

        sampling_params: one for all, or one for each prompt. arrival_steps: for each prompt, the step from now
        in which it joins. use_tqdm: show a progress bar, if standard error is a terminal and prompts are many.
        priority: for each prompt; the lowest is served first, and of equals the one that came first.
        Raises ValueError, before anything runs, for a bad prompt, naming its index.
        """
        return self._collect(self._prepare(prompts, sampling_params, arrival_steps, priority), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        arrival_steps: Sequence[int] | None = None,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """As generate(), but yields what is new as it comes; request_id is the index of the prompt.

        The prompts are checked at once and run as the iterator is read; closing it drops what is unfinished.
        """
        return self._follow(self._prepare(prompts, sampling_params, arrival_steps, priority))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, each a list of {"role", "content"}, by the model's template.

        Raises ChatTemplateError, a ValueError, for messages the template refuses or a model without one.
        """
        one = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        if not one and not _are_conversations(conversations):
            raise ValueError(
                f"messages must be a list of {{'role', 'content'}}, or a list of such lists, got {messages!r:.200}"
            )
        prompts = [self.encode_chat(c, add_generation_prompt, **template_arguments) for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_arguments: Any
    ) -> list[int]:
        """Token ids of a conversation. Control tokens come from the template only, never from the messages."""
        if self.chat_template is None:
            raise ChatTemplateError("the model has no chat template")
        return self.chat_template.encode_chat(
            self.tokenizer, messages, add_generation_prompt, **template_arguments
        )

    def embed(self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True) -> list[list[float]]:
        """The final hidden states of each prompt, pooled as the model file says (else their mean), of length 1.

        Raises ValueError, before anything runs, for a bad prompt, naming its index, and RuntimeError for a model whose
        hidden states are not finite numbers.
        """
        groups = []
        for i, prompt in enumerate(_as_list(prompts)):
            try:
                request_id = f"llm-{next(self._request_numbers)}"
                groups.append(self.engine.prepare_embedding(request_id, _plain(prompt)))
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}") from None
        embeddings = []
        for i, output in enumerate(self._collect(groups, use_tqdm)):
            completion = output.outputs[0]
            if completion.embedding is None:
                raise RuntimeError(f"prompt {i}: {completion.error}")
            embeddings.append(completion.embedding)
        return embeddings

    def get_logits(self, token_ids: Sequence[int], first: int = 0) -> NDArray[np.float32]:
        """Logits [T - first, vocab_size] float32 at the positions of token_ids from `first` on.

        Raises ValueError on bad ids, and for more of them than the context or the free KV cache holds.
        """
        with self._engine_lock():
            return self.engine.get_logits(token_ids, first)

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        arrival_steps: Sequence[int] | None,
        priority: Sequence[int] | None,
    ) -> list[RequestGroup]:
        prompt_list = [_plain(prompt) for prompt in _as_list(prompts)]
        count = len(prompt_list)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * count
        if not isinstance(sampling_params, Sequence) or not all(
            isinstance(params, SamplingParams) for params in sampling_params
        ):
            raise ValueError(
                f"sampling_params must be SamplingParams, or a list of them, got {sampling_params!r:.200}"
            )
        arrival_steps = [0] * count if arrival_steps is None else arrival_steps
        priority = [0] * count if priority is None else priority
        lists = {"sampling_params": sampling_params, "arrival_steps": arrival_steps, "priority": priority}
        for name, values in lists.items():
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
        groups = []
        for i, arguments in enumerate(
            zip(prompt_list, sampling_params, arrival_steps, priority, strict=True)
        ):
            try:
                groups.append(self.engine.prepare(f"llm-{next(self._request_numbers)}", *arguments))
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}") from None
        return groups

    def _follow(self, groups: Sequence[RequestGroup]) -> Iterator[RequestOutput]:
        """Runs the engine until all groups are finished; yields their outputs, with the index as request_id.

        Several may be followed in turn or by several threads: a step brings all of them on.
        """
        inbox: deque[RequestOutput | BaseException] = deque()
        index_of = {group.request_id: i for i, group in enumerate(groups)}
        try:
            with self._engine_lock():
                for group in groups:
                    self.engine.submit(group, inbox)
            while index_of:
                while not inbox:
                    self._advance(inbox)
                output = inbox.popleft()
                if isinstance(output, BaseException):
                    raise RuntimeError("the requests were dropped when a step of others failed") from output
                request_id = output.request_id
                output.request_id = str(index_of[request_id])
                if output.finished:
                    del index_of[request_id]
                yield output
        finally:
            # The garbage collector may close a dropped stream at any time, even in the middle of a step.
            self._abandoned.extend(index_of)
            self._abort_abandoned()

    def _advance(self, inbox: deque[RequestOutput | BaseException]) -> None:
        """Runs a step, unless another thread's has just filled the inbox."""
        with self._engine_lock():
            if inbox:
                return
            if not self.engine.has_unfinished:
                raise RuntimeError("the requests are gone: llm.engine was reset")
            try:
                self.engine.advance()
            except Exception as error:
                if error in inbox:  # else only requests of others were in the step that failed
                    raise

    @contextmanager
    def _engine_lock(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        """Aborts what nobody follows any more, or leaves that to whoever holds the engine."""
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                while self._abandoned:
                    self.engine.abort(self._abandoned.popleft())
            finally:
                self._lock.release()

    def _collect(self, groups: Sequence[RequestGroup], use_tqdm: bool) -> list[RequestOutput]:
        results = [group.empty_output() for group in groups]
        with _progress(len(groups), use_tqdm) as show:
            for output in self._follow(groups):
                results[int(output.request_id)].add(output)
                show(output)
        return results


def _load_tokenizer(gguf: GGUFFile, path: str | os.PathLike[str] | None, vocab_size: int) -> Tokenizer:
    """The model's own, or that of a tokenizer.json. Errors name the file that is wrong."""
    try:
        if path is None:
            return Tokenizer.from_gguf(gguf.metadata)
        return Tokenizer.from_file(path, gguf.metadata, vocab_size)
    except TokenizerError as error:
        names_file = path is not None and str(error).startswith(f"{path}: ")
        raise TokenizerError(str(error) if names_file else f"{gguf.path}: {error}") from None


def _are_conversations(conversations: object) -> bool:
    return (
        isinstance(conversations, Sequence)
        and len(conversations) > 0
        and all(isinstance(c, Sequence) and not isinstance(c, (str, bytes)) for c in conversations)
    )


def _as_list(prompts: object) -> Sequence[object]:
    """The prompts that were given, be it one or several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):  # whose items are numbers, too
        raise ValueError(f"prompts must be text, token ids, or a list of such, got {prompts!r}")
    several = list(prompts)
    return [several] if len(several) > 0 and isinstance(several[0], Integral) else several


def _plain(prompt: object) -> Prompt:
    """Text or token ids of a prompt, which may come as vLLM's {"prompt": ...} or {"prompt_token_ids": ...}."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    return cast("Prompt", prompt)


@contextmanager
def _progress(count: int, wanted: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """A progress bar over `count` prompts that is shown the outputs as they come."""
    if not wanted or count <= FEW_PROMPTS or not sys.stderr.isatty():
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=count, tokens=0)
        tokens = 0

        def show(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(completion.token_ids) for completion in output.outputs)
            bar.update(task, advance=output.finished, tokens=tokens)

        yield show
