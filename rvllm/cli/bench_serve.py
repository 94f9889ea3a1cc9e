"""Measure a server: any that has OpenAI's API, with requests at a rate or as many at a time as you say.

Options and figures have the names of vLLM's `bench serve`. Random prompts are English words of one token each in the
usual vocabularies; what the server counted is reported. Prompts differ from run to run, so that a prefix cache finds
what --random-prefix-len makes them share and nothing else.

--compare measures further servers on the same prompts, in turns: in each of --rounds rounds, one run of every server.
The medians over the rounds are printed, with the lowest and the highest, and their ratios to the first server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rvllm.cli.bench import natural, positive
from rvllm.cli.errors import user_errors

if TYPE_CHECKING:
    from rvllm.load import LoadOptions, RequestResult
    from rvllm.load_prompts import FilePrompts, RandomPrompts

HELP = "measure a server"
WIDTH = 50
COMPARED = {
    "output_throughput": "Output tok/s",
    "request_throughput": "Requests/s",
    "mean_ttft_ms": "Mean TTFT (ms)",
    "p50_ttft_ms": "Median TTFT (ms)",
    "p99_ttft_ms": "P99 TTFT (ms)",
    "p50_itl_ms": "Median ITL (ms)",
    "p99_itl_ms": "P99 ITL (ms)",
    "max_itl_ms": "Max ITL (ms)",
    "p99_e2el_ms": "P99 E2EL (ms)",
}


def positive_float(text: str) -> float:
    """A number greater than 0; inf is allowed."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number greater than 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def header(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, value


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    add("--compare", nargs="+", default=[], metavar="URL", help="further servers, measured in turns with the first")
    add("--backend", choices=("openai", "openai-chat"), default="openai",
        help="completions or chat completions (default: %(default)s)")
    add("--endpoint", metavar="PATH", help="(default: /v1/completions or /v1/chat/completions)")
    add("--model", help="name in the requests (default: the first that each server lists)")
    add("--api-key", help="(default: $OPENAI_API_KEY)")
    add("--header", type=header, action="append", default=[], metavar="NAME=VALUE", help="may be repeated")

    add = parser.add_argument_group("prompts").add_argument
    add("--dataset-name", choices=("random", "custom", "sharegpt", "text"),
        help="random, or the form of --dataset-path: JSON lines of {\"prompt\", \"output_tokens\"}, ShareGPT, or a "
        "prompt a line (default: by the file's suffix)")
    add("--dataset-path", type=Path, metavar="FILE", help="take prompts from a file")
    add("--num-prompts", type=positive, default=64, metavar="N", help="requests in a round (default: %(default)s)")
    add("--random-input-len", "--input-len", type=positive, default=128, metavar="N",
        help="words of a random prompt after its prefix (default: %(default)s)")
    add("--random-prefix-len", type=natural, default=0, metavar="N",
        help="words before them that prompts share (default: %(default)s)")
    add("--num-prefixes", type=positive, default=1, metavar="N",
        help="prefixes, which the prompts have in turns (default: %(default)s)")
    add("--output-len", "--random-output-len", type=positive, metavar="N",
        help="tokens to ask for (default: 128, or what the file says)")
    add("--random-range-ratio", type=float, default=0.0, metavar="R",
        help="random lengths between (1 - R) and (1 + R) times those above (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="generate all the tokens that are asked for")
    add("--temperature", type=float, default=0.0, metavar="T", help="(default: %(default)s)")
    add("--extra-body", type=json_object, default={}, metavar="JSON",
        help="further fields of each request; null drops one")
    add("--seed", type=natural, default=0, metavar="N", help="of prompts and arrivals (default: %(default)s)")

    add = parser.add_argument_group("traffic").add_argument
    add("--request-rate", type=positive_float, default=float("inf"), metavar="R",
        help="requests a second (default: inf, all at once)")
    add("--burstiness", type=positive_float, default=1.0, metavar="B",
        help="1: a Poisson process; less: in bursts; more: evenly (default: %(default)s)")
    add("--max-concurrency", type=positive, metavar="N", help="requests in flight at a time (default: no limit)")
    add("--timeout", type=positive_float, default=600.0, metavar="SECONDS",
        help="for one request (default: %(default)s)")
    add("--num-warmups", type=natural, default=1, metavar="N",
        help="requests before, not counted (default: %(default)s)")
    add("--rounds", type=positive, metavar="N", help="(default: 1; with --compare 3)")

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", type=Path, metavar="FILE", help="draw latencies, such as out.png (needs rvllm[bench])")
# fmt: on


def run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        from rvllm.cli.plot import require_matplotlib

        require_matplotlib()
    with user_errors():
        prompts = _make_prompts(args)
        rounds = args.rounds or (3 if args.compare else 1)
        results = asyncio.run(_measure(args, _make_options(args), prompts, rounds))
    from rvllm.load import summarize

    servers: list[dict[str, Any]] = []
    for url, runs in results.items():
        servers.append({"base_url": url, "rounds": [summarize(run) for run in runs]})
    is_one = rounds == len(servers) == 1
    if args.json:
        print(json.dumps(servers[0]["rounds"][0] if is_one else servers, indent=2))
    else:
        for server in servers:
            for i, summary in enumerate(server["rounds"]):
                print(_report(summary, args, "" if is_one else f"{server['base_url']}, round {i + 1}"))
        if not is_one:
            print(_comparison(servers))
    if args.plot is not None:
        from rvllm.cli.plot import plot_load

        with user_errors():
            plot_load({url: [r for run in runs for r in run] for url, runs in results.items()}, args.plot)
    return 0 if all(summary["completed"] for server in servers for summary in server["rounds"]) else 1


def _make_prompts(args: argparse.Namespace) -> RandomPrompts | FilePrompts:
    from rvllm.load_prompts import DEFAULT_OUTPUT_LEN, RandomPrompts, read_prompts

    if args.dataset_path is None:
        if args.dataset_name not in (None, "random"):
            raise ValueError(f"--dataset-name {args.dataset_name} needs --dataset-path")
        return RandomPrompts(
            args.random_input_len,
            args.output_len or DEFAULT_OUTPUT_LEN,
            args.random_range_ratio,
            args.random_prefix_len,
            args.num_prefixes,
        )
    if args.dataset_name == "random":
        raise ValueError("--dataset-path: random prompts come from no file")
    return read_prompts(args.dataset_path, args.dataset_name, args.output_len)


def _make_options(args: argparse.Namespace) -> LoadOptions:
    from rvllm.load import LoadOptions

    return LoadOptions(
        backend=args.backend,
        model=args.model,
        request_rate=None if args.request_rate == float("inf") else args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        extra_body=args.extra_body,
        path=args.endpoint,
        timeout=args.timeout,
    )


async def _measure(
    args: argparse.Namespace, options: LoadOptions, prompts: RandomPrompts | FilePrompts, rounds: int
) -> dict[str, list[list[RequestResult]]]:
    """By address, the results of each round. Raises OSError and ValueError when a server cannot be measured."""
    from dataclasses import replace

    import numpy as np

    from rvllm.http_client import Endpoint, bearer
    from rvllm.load import arrival_times, drive, first_model, send

    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {**({"Authorization": bearer(key)} if key else {}), **dict(args.header)}
    servers = []
    urls = [url.rstrip("/").removesuffix("/v1") for url in (args.base_url, *args.compare)]
    for url in dict.fromkeys(urls):
        endpoint = Endpoint(url, headers)
        try:
            model = options.model or await first_model(endpoint)
        except OSError as error:
            raise ValueError(f"{url}: {error.strerror or error}") from None
        servers.append((endpoint, replace(options, model=model)))
        for request in prompts.sample(args.num_warmups, np.random.default_rng((args.seed, 0))):
            result = await send(*servers[-1], request)
            if result.error is not None:
                raise ValueError(f"{url}: {result.error}: {result.message}")
    results: dict[str, list[list[RequestResult]]] = {endpoint.base_url: [] for endpoint, _ in servers}
    for i in range(rounds):
        rng = np.random.default_rng((args.seed, i + 1))
        requests = prompts.sample(args.num_prompts, rng)
        arrivals = arrival_times(len(requests), options, rng)
        for endpoint, own_options in servers if i % 2 == 0 else servers[::-1]:
            with _Progress(f"{endpoint.base_url} {i + 1}/{rounds}", len(requests)) as advance:
                run = await drive(endpoint, own_options, requests, arrivals, advance)
            results[endpoint.base_url].append(run)
    return results


class _Progress:
    """Counts finished requests on standard error, if that is a terminal."""

    def __init__(self, label: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __call__(self, result: RequestResult) -> None:
        self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _report(summary: dict[str, Any], args: argparse.Namespace, title: str) -> str:
    from rvllm.load import METRICS, PERCENTILES

    def line(label: str, value: float | str | None, digits: int = 2) -> str:
        text = "-" if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"
        return f"{label + ':':<40} {text:<10}".rstrip()

    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *([title] if title else [])]
    lines += [
        line("Successful requests", summary["completed"], 0),
        line("Failed requests", summary["failed"], 0),
    ]
    for kind, count in summary["errors"].items():
        lines.append(f"  {count} with {kind}: {summary['error_messages'][kind]}")
    if args.max_concurrency is not None:
        lines.append(line("Maximum request concurrency", args.max_concurrency, 0))
    if args.request_rate != float("inf"):
        lines.append(line("Request rate configured (RPS)", args.request_rate))
    lines += [
        line("Benchmark duration (s)", summary["duration"]),
        line("Total input tokens", summary["total_input_tokens"], 0),
        line("Total cached input tokens", summary["cached_input_tokens"], 0),
        line("Total generated tokens", summary["total_output_tokens"], 0),
        line("Request throughput (req/s)", summary["request_throughput"]),
        line("Output token throughput (tok/s)", summary["output_throughput"]),
        line("Peak concurrent requests", summary["max_concurrent_requests"], 0),
        line("Total token throughput (tok/s)", summary["total_token_throughput"]),
    ]
    for metric, title in METRICS.items():
        name = metric.upper()
        lines.append(f"{title:-^{WIDTH}}")
        lines.append(line(f"Mean {name} (ms)", summary[f"mean_{metric}_ms"]))
        for percentile in PERCENTILES:
            label = "Median" if percentile == 50 else f"P{percentile}"
            lines.append(line(f"{label} {name} (ms)", summary[f"p{percentile}_{metric}_ms"]))
        lines.append(line(f"Max {name} (ms)", summary[f"max_{metric}_ms"]))
    return "\n".join([*lines, "=" * WIDTH])


def _comparison(servers: list[dict[str, Any]]) -> str:
    """A Markdown table: a row a figure, a column a server: median (lowest..highest), ratio to the first server."""
    lines = [
        f"| median of {len(servers[0]['rounds'])} rounds | {' | '.join(server['base_url'] for server in servers)} |",
        f"|---|{'---:|' * len(servers)}",
    ]
    for key, label in COMPARED.items():
        cells: list[str] = []
        columns = [[r[key] for r in server["rounds"] if r[key] is not None] for server in servers]
        for values in columns:
            cell = f"{median(values):.2f} ({min(values):.2f}..{max(values):.2f})" if values else "-"
            if cells and values and columns[0] and median(columns[0]):
                cell += f" {median(values) / median(columns[0]):.2f}x"
            cells.append(cell)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)
