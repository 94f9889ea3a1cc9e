"""Compare `rvllm serve` with llama.cpp's llama-server on one GGUF file and the same requests, in interleaved rounds.

Throughput: 64 requests, 32 at a time, of 300-token prompts that share their first 200 tokens, 64 tokens out.
Gap: while requests are being answered, a prompt of 8,000 tokens arrives; what counts is the longest that any of the
running ones then waits for its next token.

Both servers are up all the time, but only one gets requests at a time; the order alternates. A round has prompts of its
own, the same for both. The table has medians over the rounds with the lowest and the highest, and the median of the
rounds' ratios. A first run of every setting of llama-server's (flash attention, unified KV cache) is not counted, but
chooses the setting that counts. "Other load" is what other processes took of the processors meanwhile: with more than
a few percent the figures say little. scripts/build_llama_server.sh builds the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from other_load import OtherLoad, cpu_seconds
from server_process import ServerProcess, end_servers_on_sigterm, run_server, rvllm_command

from rvllm.cli.bench import natural, positive
from rvllm.http_client import Endpoint
from rvllm.load import LoadOptions, RequestResult, drive, first_model, send, summarize
from rvllm.load_prompts import RandomPrompts
from rvllm.models import ModelError, resolve_model
from rvllm.system import available_cpus

FIGURES = {
    "output_throughput": "output tok/s",
    "p50_ttft_ms": "median TTFT, ms",
    "p99_ttft_ms": "p99 TTFT, ms",
    "p50_itl_ms": "median ITL, ms",
    "p99_itl_ms": "p99 ITL, ms",
    "gap_ms": "worst gap at a long prompt, ms",
    "long_ttft_ms": "TTFT of the long prompt, ms",
}


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens. num_running: requests that are being answered when the long prompt arrives."""

    num_requests: int = 64
    concurrency: int = 32
    prompt_len: int = 300
    shared_prefix: int = 200
    output_len: int = 64
    long_prompt_len: int = 8000
    num_running: int = 8

    def prompts(self) -> RandomPrompts:
        own = self.prompt_len - self.shared_prefix
        return RandomPrompts(own, self.output_len, prefix_len=self.shared_prefix)


async def measure(server: ServerProcess, workload: Workload, seed: int) -> dict[str, float]:
    """One round on one server. Raises RuntimeError when a request fails."""
    endpoint = Endpoint(server.url)
    options = LoadOptions(
        model=await first_model(endpoint), max_concurrency=workload.concurrency, ignore_eos=True
    )
    rng = np.random.default_rng(seed)
    requests = workload.prompts().sample(workload.num_requests, rng)
    results = await drive(endpoint, options, requests, [0.0] * len(requests))
    _check(server, results)
    figures = summarize(results)
    if workload.long_prompt_len:
        figures |= await measure_gap(server, endpoint, replace(options, max_concurrency=None), workload, rng)
    return {key: figures[key] for key in FIGURES if key in figures}


async def measure_gap(
    server: ServerProcess,
    endpoint: Endpoint,
    options: LoadOptions,
    workload: Workload,
    rng: np.random.Generator,
) -> dict[str, float]:
    """The longest wait of a running request for a token, from the arrival of a long prompt to its first token."""
    requests = RandomPrompts(20, 4000).sample(workload.num_running, rng)
    long_request = RandomPrompts(workload.long_prompt_len, 1).sample(1, rng)[0]
    streams = [RequestResult() for _ in requests]
    running = [
        asyncio.create_task(send(endpoint, options, *pair)) for pair in zip(requests, streams, strict=True)
    ]
    try:
        while not all(len(stream.piece_times) >= 5 or stream.error for stream in streams):
            await asyncio.sleep(0.02)
        long_result = await send(endpoint, options, long_request)
        _check(server, [long_result, *streams])
        # One more token each: a wait that began before the long prompt's first token is not over with it.
        counts = [len(stream.piece_times) for stream in streams]
        while any(
            len(stream.piece_times) == count and not task.done()
            for stream, count, task in zip(streams, counts, running, strict=True)
        ):
            await asyncio.sleep(0.02)
        _check(server, streams)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    end = long_result.piece_times[0]
    gaps = [
        after - before
        for stream in streams
        for before, after in itertools.pairwise(stream.piece_times)
        if after > long_result.start and before < end
    ]
    return {"gap_ms": 1000 * max(gaps), "long_ttft_ms": 1000 * (end - long_result.start)}


def _check(server: ServerProcess, results: Sequence[RequestResult]) -> None:
    for result in results:
        if result.error is not None:
            raise RuntimeError(f"{server.command[0]}: {result.error}: {result.message}")


def peer_settings(context: int, workload: Workload) -> list[list[str]]:
    """Arguments of llama-server to choose from; the context holds all requests of the workload in each."""
    slots = workload.concurrency
    longest = max(workload.long_prompt_len + 64, workload.prompt_len + workload.output_len, 4096)
    if longest > context:
        raise ValueError(f"{longest} tokens are more than the context of {context}")
    unified = max(slots * (workload.prompt_len + workload.output_len), (workload.num_running + 2) * longest)
    kinds = (["--no-kv-unified", "-c", str(slots * longest)], ["--kv-unified", "-c", str(unified)])
    return [
        ["-np", str(slots), *kind, "-fa", flash_attention]
        for kind, flash_attention in itertools.product(kinds, ("off", "on"))
    ]


def choose_peer(command: list[str], settings: Sequence[list[str]], workload: Workload) -> list[str]:
    """The setting with the most output tokens a second."""
    speeds = {}
    for i, setting in enumerate(settings):
        with run_server([*command, *setting]) as server:
            figures = asyncio.run(measure(server, replace(workload, long_prompt_len=0), 0))
        speeds[i] = figures["output_throughput"]
        print(f"llama-server {' '.join(setting)}: {speeds[i]:.1f} tok/s", file=sys.stderr, flush=True)
    return settings[max(speeds, key=lambda i: speeds[i])]


def compare(
    ours: list[str], peer: list[str], workload: Workload, rounds: int, logs: tuple[str | None, str | None]
) -> dict[str, Any]:
    """Figures of both in each round."""
    with run_server(ours, logs[0]) as first, run_server(peer, logs[1]) as second:
        servers = {"rvllm": first, "llama-server": second}
        warm_up = replace(workload, num_requests=workload.concurrency, output_len=8, long_prompt_len=0)
        for server in servers.values():
            asyncio.run(measure(server, warm_up, 10**6))
        load = OtherLoad(lambda: sum(cpu_seconds(server.pid) for server in servers.values()))
        results: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for i in range(rounds):
            for name in list(servers) if i % 2 == 0 else list(servers)[::-1]:
                results[name].append(asyncio.run(measure(servers[name], workload, i)))
                print(f"round {i + 1} {name}: {json.dumps(results[name][-1])}", file=sys.stderr, flush=True)
        return {"results": results, "other_load": load.share()}


def table(results: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| | rvllm | llama-server | rvllm / llama-server |", "|---|---:|---:|---:|"]
    for key, label in FIGURES.items():
        columns = [[row[key] for row in results[name] if row.get(key)] for name in ("rvllm", "llama-server")]
        if all(columns):
            ratios = [a / b for a, b in zip(*columns, strict=True)]
            lines.append(f"| {label} | {' | '.join(_spread(values) for values in (*columns, ratios))} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    digits = 2 if median(values) < 10 else 0
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--llama-server", type=Path, required=True, metavar="PATH", help="the peer's program")
    add("-m", "--model", help="a GGUF file, or what `rvllm pull` takes (default: the default model)")
    add(
        "-t", "--threads", type=positive, default=available_cpus(), metavar="N", help="(default: %(default)s)"
    )
    add("--rounds", type=positive, default=5, metavar="N", help="(default: %(default)s)")
    for name, value in vars(Workload()).items():
        kind = natural if name in ("shared_prefix", "long_prompt_len") else positive
        add(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=value,
            metavar="N",
            help="(default: %(default)s)",
        )
    add("--context", type=positive, default=8192, metavar="N", help="of one request (default: %(default)s)")
    add("--peer-arguments", metavar="ARGS", help="of llama-server, instead of trying its settings")
    add("--serve-arguments", default="", metavar="ARGS", help="more for rvllm serve")
    add("--logs", metavar="FOLDER", help="where both servers log")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        workload = Workload(**{name: getattr(args, name) for name in vars(Workload())})
        common = ["-m", str(resolve_model(args.model)), "-t", str(args.threads)]
        if args.logs is not None:
            os.makedirs(args.logs, exist_ok=True)
        ours = rvllm_command([*common, "-c", str(args.context), *args.serve_arguments.split()])
        peer = [str(args.llama_server), *common, "--no-webui"]
        conditions = {
            "load_average": os.getloadavg()[0],
            "cpus": available_cpus(),
            "workload": vars(workload),
        }
        if args.peer_arguments is not None:
            peer += args.peer_arguments.split()
        else:
            peer += choose_peer(peer, peer_settings(args.context, workload), workload)
        logs = (
            [None, None] if args.logs is None else [f"{args.logs}/{n}.log" for n in ("rvllm", "llama-server")]
        )
        report = {
            **conditions,
            "commands": [ours, peer],
            **compare(ours, peer, workload, args.rounds, (logs[0], logs[1])),
        }
    except (ModelError, OSError, RuntimeError, ValueError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(
            f"rvllm serve {' '.join(ours[4:])}\nllama-server {' '.join(peer[1:])}\n\n{table(report['results'])}"
        )
        print(f"\nother load: {report['other_load']:.1%}")
    return 0


if __name__ == "__main__":
    end_servers_on_sigterm()
    sys.exit(main())
