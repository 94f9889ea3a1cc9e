"""Measure speed by batch size, or replay a trace of requests.

The batch sweep prefills B prompts, then decodes them together, and prints the columns of llama-batched-bench: prompt
tokens and generated tokens of each request (PP, TG), requests (B), tokens in the KV cache in the end (N_KV), seconds
and tokens per second of prefill (T_PP, S_PP), decode (T_TG, S_TG) and both (T, S); then the share of the prompts found
in the prefix cache and the share of the KV cache in use. A shared prefix counts once.

A trace is a file of JSON lines such as {"prompt_len": 128, "gen_len": 64, "arrival_step": 0}. For each request it
reports the steps and the seconds from arrival to the first token and to the last, and tokens per second over all.

Prompts are random token ids; a first run is discarded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rvllm.cli.arguments import add_engine_arguments, load_llm
from rvllm.cli.errors import CommandError, user_errors
from rvllm.cli.profiling import (
    add_profile_arguments,
    begin_profile,
    print_profile,
    wants_profile,
    write_profile_trace,
)

if TYPE_CHECKING:
    from rvllm.benchmark import Workload
    from rvllm.llm import LLM
    from rvllm.trace import TraceEntry

HELP = "measure speed"

# Column, heading, width, digits after the point.
COLUMNS = (
    ("PP", "PP", 6, 0), ("TG", "TG", 6, 0), ("B", "B", 4, 0), ("N_KV", "N_KV", 6, 0),
    ("T_PP", "T_PP s", 8, 3), ("S_PP", "S_PP t/s", 8, 2), ("T_TG", "T_TG s", 8, 3), ("S_TG", "S_TG t/s", 8, 2),
    ("T", "T s", 8, 3), ("S", "S t/s", 8, 2), ("HIT", "HIT %", 6, 1), ("KV", "KV %", 6, 1),
)  # fmt: skip
TRACE_COLUMNS = (
    ("PP", "PP", 6, 0), ("TG", "TG", 6, 0), ("ARRIVAL", "ARRIVAL", 8, 0), ("STEPS", "STEPS", 8, 0),
    ("T_FIRST", "T_FIRST s", 9, 3), ("T", "T s", 8, 3),
)  # fmt: skip

PERCENT = ("HIT", "KV")  # shares


def natural(text: str, least: int = 0) -> int:
    """An integer from `least` on."""
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from {least} on")
    return int(text)


def positive(text: str) -> int:
    """An integer from 1 on."""
    return natural(text, 1)


def batch_sizes(text: str) -> list[int]:
    """Integers from 1 on, as in 1,4,8."""
    return [positive(word) for word in text.split(",")]


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to measure")
    what = group.add_mutually_exclusive_group()
    what.add_argument("-npl", "--batch-sizes", type=batch_sizes, default=[1, 4, 8], metavar="N,N,...",
                      help="requests that run together (default: 1,4,8)")
    what.add_argument("--trace-file", type=Path, metavar="FILE", help="replay these requests instead of a sweep")
    add_workload_arguments(group)
    group.add_argument("--repeat", type=positive, default=3, metavar="N",
                       help="runs, of which the median counts (default: %(default)s)")
    group.add_argument("--seed", type=natural, default=0, metavar="N", help="of the prompts (default: %(default)s)")

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print a list of rows keyed by column; for a trace, one object")
    add("--plot", type=Path, metavar="FILE", help="draw speed over batch size, such as out.png (needs rvllm[bench])")
    add_engine_arguments(parser)
    add_profile_arguments(parser)


def add_workload_arguments(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    add("-npp", "--prompt-len", type=positive, default=128, metavar="N",
        help="tokens of each prompt (default: %(default)s)")
    add("-ntg", "--gen-len", type=positive, default=64, metavar="N",
        help="tokens to generate for each prompt (default: %(default)s)")
    add("--depth", type=natural, default=0, metavar="N",
        help="tokens of context in the KV cache before each prompt, not counted (default: %(default)s)")
    add("--shared-prefix", type=natural, default=0, metavar="N",
        help="first tokens that are the same in all prompts (default: %(default)s)")
# fmt: on


def run(args: argparse.Namespace) -> int:
    if args.trace_file is not None and args.depth:
        raise CommandError("--depth: the requests of a trace begin without context")
    if args.trace_file is not None and args.plot is not None:
        raise CommandError("--plot: a trace has no batch sizes to draw")
    if args.plot is not None:
        from rvllm.cli.plot import require_matplotlib

        require_matplotlib()
    if args.trace_file is not None:
        return _run_trace(args)
    with user_errors():
        workloads = make_workloads(args)
    args.max_num_seqs = max(args.max_num_seqs, *args.batch_sizes)
    llm = load_llm(args, profile=wants_profile(args))
    rows = _sweep(llm, workloads, args)
    write_profile_trace(args, llm)
    if args.json:
        print(json.dumps(rows, indent=2))
    if args.plot is not None:
        from rvllm.cli.plot import plot

        with user_errors():
            plot(rows, args.plot)
    return 0


def make_workloads(args: argparse.Namespace) -> list[Workload]:
    """One workload for each batch size. Raises ValueError."""
    from rvllm.benchmark import Workload

    return [
        Workload(batch_size, args.prompt_len, args.gen_len, args.depth, args.shared_prefix)
        for batch_size in args.batch_sizes
    ]


def _sweep(llm: LLM, workloads: Sequence[Workload], args: argparse.Namespace) -> list[dict[str, float]]:
    from rvllm.benchmark import Benchmark

    benchmark = Benchmark(llm.engine, args.seed)
    rows = []
    for workload in workloads:
        with user_errors():
            benchmark.measure(workload)  # the warm-up
            begin_profile(llm)
            rows.append(benchmark.measure(workload, args.repeat).row())
        if not args.json:
            if len(rows) == 1:
                _print_header(COLUMNS)
            _print_row(COLUMNS, rows[-1])
        print_profile(args, llm, f"B = {workload.batch_size}, {args.repeat} runs: ")
    return rows


def _run_trace(args: argparse.Namespace) -> int:
    entries = _read_trace(args.trace_file)
    llm = load_llm(args, profile=wants_profile(args))
    from rvllm.trace import Trace

    with user_errors():
        trace = Trace(llm.engine, entries, args.shared_prefix, args.seed)
        trace.measure()  # the warm-up
        begin_profile(llm)
        result = trace.measure(args.repeat)
    print_profile(args, llm, f"{args.repeat} runs: ")
    write_profile_trace(args, llm)
    rows, summary = [request.row() for request in result.requests], result.summary()
    if args.json:
        print(json.dumps({**summary, "requests": rows}, indent=2))
        return 0
    _print_header(TRACE_COLUMNS)
    for row in rows:
        _print_row(TRACE_COLUMNS, row)
    print(
        f"\n{summary['B']} requests, {summary['PP']} prompt and {summary['TG']} generated tokens in "
        f"{summary['T']:.3f} s and {summary['STEPS']} steps: {summary['S']:.2f} t/s, "
        f"generated {summary['S_TG']:.2f} t/s\n"
        f"prefix cache: {100 * summary['HIT']:.1f} % of the prompts found; KV cache: at most "
        f"{100 * summary['KV']:.1f} % in use; preemptions: {summary['PREEMPTIONS']}"
    )
    return 0


def _read_trace(path: Path) -> list[TraceEntry]:
    from rvllm.trace import parse_trace

    with user_errors():
        data = path.read_bytes()
        try:
            return parse_trace(data.decode("utf-8-sig").splitlines())
        except ValueError as error:
            raise CommandError(f"{path}: {error}") from None


def _print_header(columns: Sequence[tuple[str, str, int, int]]) -> None:
    print(f"|{' | '.join(f'{heading:>{width}}' for _, heading, width, _ in columns)} |")
    print(f"|{'-|-'.join('-' * width for _, _, width, _ in columns)}-|", flush=True)


def _print_row(columns: Sequence[tuple[str, str, int, int]], row: dict[str, float]) -> None:
    values = ((row[key] * (100 if key in PERCENT else 1), width, digits) for key, _, width, digits in columns)
    print(f"|{' | '.join(f'{value:{width}.{digits}f}' for value, width, digits in values)} |", flush=True)
