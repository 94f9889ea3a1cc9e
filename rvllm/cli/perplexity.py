"""Measure how well a model predicts a text, or how far it is from a reference.

The text is cut into chunks, as llama.cpp's perplexity does it: each begins with BOS where the model wants one, and the
tokens of its second half are scored. --kl-divergence compares the predictions with a reference: those that another run
wrote with --save-logits (in llama.cpp's format), or with --kl-divergence-f32 the same weights dequantized to F32, which
takes memory for a second model of 4 bytes a weight.

Errors are standard errors of the mean. KLD is the Kullback-Leibler divergence in nats, same top the share of tokens for
which both find the same token likeliest, and Δp how much likelier than the reference the model finds the next token.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rvllm.cli.arguments import add_engine_arguments, load_llm, read_text
from rvllm.cli.errors import CommandError, user_errors, writing
from rvllm.cli.profiling import add_profile_arguments, print_profile, wants_profile, write_profile_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from rvllm.llm import LLM
    from rvllm.logits_file import LogitsReader
    from rvllm.perplexity import LogProbs, Scores

    BaseLogProbs = Callable[[int, list[int]], LogProbs]

HELP = "measure accuracy on a text"
DEFAULT_CHUNK = 512


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure")
    group.add_argument("-f", "--file", metavar="FILE", help="the text, or - for standard input")
    group.add_argument("--chunks", type=int, metavar="N", help="at most N chunks (default: the whole text)")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--save-logits", "--save-all-logits", type=Path, metavar="FILE",
                      help="write the log-probabilities, to be a reference")
    form.add_argument("--kl-divergence", action="store_true", help="compare with the reference in a file")
    form.add_argument("--kl-divergence-f32", action="store_true", help="compare with the same weights in F32")
    group.add_argument("--kl-divergence-base", type=Path, metavar="FILE",
                       help="with --kl-divergence: the file that --save-logits wrote; -f may then be left out")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_profile_arguments(parser)
    add_engine_arguments(parser, f"tokens of a chunk (default: {DEFAULT_CHUNK}, or what the reference has)")
# fmt: on


def run(args: argparse.Namespace) -> int:
    if args.kl_divergence != (args.kl_divergence_base is not None):
        raise CommandError("--kl-divergence and --kl-divergence-base FILE need each other")
    if args.file is None and not args.kl_divergence:
        raise CommandError("no text: use -f FILE")
    if args.chunks is not None and args.chunks < 1:
        raise CommandError(f"--chunks must be at least 1, got {args.chunks}")
    if args.max_model_len == 0:
        raise CommandError("--ctx-size must be at least 1, got 0")
    text = None if args.file is None else read_text(args.file)
    reader = _open_reference(args) if args.kl_divergence else None
    if args.max_model_len is None:
        args.max_model_len = DEFAULT_CHUNK if reader is None else reader.chunk_size
    if args.num_blocks is None and args.kv_cache_memory is None:
        args.num_blocks = max(1, -(-args.max_model_len // max(1, args.block_size)))
    llm = load_llm(args, profile=wants_profile(args))
    with user_errors():
        chunks = _read_chunks(args, llm, text, reader)
    result = _measure(args, llm, chunks, _base_log_probs(args, reader))
    print(json.dumps(result, indent=2) if args.json else _report(result))
    print_profile(args, llm)
    write_profile_trace(args, llm)
    return 0


def _open_reference(args: argparse.Namespace) -> LogitsReader:
    from rvllm.logits_file import LogitsReader

    with user_errors():
        reader = LogitsReader(args.kl_divergence_base)
    if args.max_model_len not in (None, reader.chunk_size):
        raise CommandError(
            f"--ctx-size {args.max_model_len}: {reader.path} has chunks of {reader.chunk_size} tokens"
        )
    return reader


def _read_chunks(
    args: argparse.Namespace, llm: LLM, text: str | None, reader: LogitsReader | None
) -> NDArray[np.int32]:
    """Token ids [chunks, chunk size] of the text, or those of the reference. Raises ValueError."""
    from rvllm.perplexity import split

    if reader is None:
        return split(llm.tokenizer.encode(text or ""), args.max_model_len, args.chunks)
    if reader.vocab_size != llm.engine.runner.vocab_size:
        raise ValueError(
            f"{reader.path}: a vocabulary of {reader.vocab_size} tokens, the model has "
            f"{llm.engine.runner.vocab_size}"
        )
    chunks = reader.chunks if args.chunks is None else reader.chunks[: args.chunks]
    if text is not None:
        own = split(llm.tokenizer.encode(text), reader.chunk_size, len(chunks))
        if own.shape != chunks.shape or (own != chunks).any():
            raise ValueError(f"{reader.path}: its tokens are not those of {args.file}")
    return chunks


def _base_log_probs(args: argparse.Namespace, reader: LogitsReader | None) -> BaseLogProbs | None:
    """The reference: gives log-probabilities of a chunk by its index and token ids. Loads a model if it takes one."""
    from rvllm.perplexity import first_scored, log_softmax

    if reader is not None:
        return lambda i, ids: reader.log_probs(i)
    if not args.kl_divergence_f32:
        return None
    llm = load_llm(argparse.Namespace(**{**vars(args), "dtype": "float32"}))

    def compute(i: int, ids: list[int]) -> LogProbs:
        logits = llm.get_logits(ids, first_scored(len(ids)))[:-1]
        return lambda rows: log_softmax(logits[rows])

    return compute


def _measure(
    args: argparse.Namespace, llm: LLM, chunks: NDArray[np.int32], base_log_probs: BaseLogProbs | None
) -> dict[str, float]:
    """Scores chunk by chunk and prints the figures so far; returns all of them."""
    from rvllm.logits_file import LogitsWriter
    from rvllm.perplexity import concatenate, first_scored, score, summary

    first = first_scored(chunks.shape[1])
    bos = llm.tokenizer.bos_token_id if llm.tokenizer.add_bos_token else None
    parts: list[Scores] = []
    seconds = 0.0
    with user_errors(), ExitStack() as stack:
        writer = None
        if args.save_logits is not None:
            vocab_size = llm.engine.runner.vocab_size
            stack.enter_context(writing(args.save_logits))
            writer = stack.enter_context(LogitsWriter(args.save_logits, chunks, vocab_size))
        for i, chunk in enumerate(chunks):
            ids = chunk.tolist() if bos is None else [bos, *chunk[1:].tolist()]
            start = time.perf_counter()
            logits = llm.get_logits(ids, first)[:-1]
            seconds += time.perf_counter() - start
            if writer is not None:
                writer.write(logits)
            base = None if base_log_probs is None else base_log_probs(i, ids)
            parts = [concatenate([*parts, score(logits, chunk[first + 1 :], base)])]
            if not args.json:
                _print_row(i + 1, summary(parts[0]))
    speed = {"seconds": seconds, "tokens_per_second": chunks.size / seconds}
    return {"chunks": len(chunks), "tokens": chunks.size, **summary(parts[0]), **speed}


def _print_row(num_chunks: int, so_far: dict[str, float]) -> None:
    columns = [
        (heading, f"{so_far[key]:{form}}", f"{so_far[f'{key}_error']:{form}}")
        for heading, key, form in (
            ("PPL", "ppl", ".4f"),
            ("KLD", "kld", ".5f"),
            ("same top", "same_top", ".2%"),
        )
        if key in so_far
    ]
    if num_chunks == 1:
        print("chunk", *(f"{heading:>10} {'±':>9}" for heading, _, _ in columns))
    print(f"{num_chunks:5}", *(f"{mean:>10} {error:>9}" for _, mean, error in columns), flush=True)


def _report(result: dict[str, float]) -> str:
    lines = [
        f"\n{label:26}{result[key]:{form}} ± {result[f'{key}_error']:{form}}"
        for label, key, form in (
            ("PPL", "ppl", ".4f"),
            ("PPL of the reference", "base_ppl", ".4f"),
            ("ln(PPL / reference)", "log_ppl_ratio", ".5f"),
            ("mean KLD", "kld", ".5f"),
            ("same top token", "same_top", ".2%"),
            ("mean Δp", "delta_p", ".3%"),
        )
        if key in result
    ]
    lines += [
        f"\n{label:26}{result[key]:{form}}"
        for label, key, form in (
            ("RMS Δp", "rms_delta_p", ".3%"),
            ("maximum KLD", "kld_max", ".5f"),
            ("99.9 % of KLD below", "kld_99.9", ".5f"),
            ("99 % of KLD below", "kld_99", ".5f"),
            ("median KLD", "kld_50", ".5f"),
        )
        if key in result
    ]
    speed = f"{result['seconds']:.2f} s, {result['tokens_per_second']:.2f} tokens/s"
    return f"{''.join(lines)}\n{result['chunks']} chunks, {result['tokens']} tokens in {speed}"
