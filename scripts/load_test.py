"""Load a server with many clients that behave well and badly, and check that it stays fair, exact and alive.

Starts `rvllm serve` on loopback with the arguments after --, and puts clients on it that send prompts of random
lengths, cancel, send malformed bodies, read slowly, leave in mid-request or are killed. It fails when there was a
status of 5xx, a seeded request with another answer than before, a request that took longer than --patience, a time
without progress longer than --max-stall, a block or a connection that is not free in the end, or memory that grew after
the first third by more than --max-growth.

    scripts/load_test.py --clients 256 --minutes 10 -- --num-blocks 2048
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil
from load_clients import Client, Limits, ServerFaultError
from server_process import ServerProcess, end_servers_on_sigterm, run_server, rvllm_command

from rvllm.http_client import Endpoint

MAX_FAILURES = 20  # printed


@dataclass
class Monitor:
    """Samples the server's memory and progress twice a second."""

    endpoint: Endpoint
    process: psutil.Process
    rss: list[tuple[float, int]] = field(default_factory=list)  # seconds from the start, bytes
    longest_stall: float = 0.0
    slowest_answer: float = 0.0
    most_running: int = 0
    most_waiting: int = 0
    preemptions: float = 0.0

    async def run(self) -> None:
        start = last_progress = time.monotonic()
        before = -1.0
        while True:
            asked = time.monotonic()
            metrics = await read_metrics(self.endpoint)
            now = time.monotonic()
            self.slowest_answer = max(self.slowest_answer, now - asked)
            self.rss.append((now - start, self.process.memory_info().rss))
            running, waiting = metrics["num_requests_running"], metrics["num_requests_waiting"]
            progress = metrics["engine_steps_total"]
            if progress != before or not running + waiting:
                last_progress, before = now, progress
            self.longest_stall = max(self.longest_stall, now - last_progress)
            self.most_running = max(self.most_running, int(running))
            self.most_waiting = max(self.most_waiting, int(waiting))
            self.preemptions = metrics["num_preemptions_total"]
            await asyncio.sleep(0.5)

    def growth(self) -> int:
        """Bytes from the highest of the second third to the highest of the last."""
        end = self.rss[-1][0]
        thirds = [
            [rss for seconds, rss in self.rss if low <= seconds / end <= low + 1 / 3]
            for low in (1 / 3, 2 / 3)
        ]
        return max(thirds[1]) - max(thirds[0]) if all(thirds) else 0


async def read_metrics(endpoint: Endpoint) -> dict[str, float]:
    """Values of /metrics by name, without the prefix; of several with one name, their sum."""
    response = await endpoint.request("GET", "/metrics")
    values: dict[str, float] = {}
    for line in response.body.decode().splitlines():
        if line.startswith("rvllm:"):
            name, _, value = line.removeprefix("rvllm:").rpartition(" ")
            name = name.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


async def load(args: argparse.Namespace, server: ServerProcess) -> dict[str, Any]:
    """Runs the clients; returns what was seen, with the list of failures."""
    endpoint = Endpoint(server.url)
    process = psutil.Process(server.pid)
    limits = Limits(args.max_prompt, args.max_tokens, args.context, args.patience, args.linger)
    answers: dict[int, str] = {}
    monitor = Monitor(endpoint, process)
    watch = asyncio.create_task(monitor.run())
    idle_fds = process.num_fds()
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    end = time.monotonic() + 60 * args.minutes

    async def live(number: int) -> None:
        client = Client(endpoint, random.Random(f"{args.seed} {number}"), limits, answers)
        await asyncio.sleep(client.rng.uniform(0, args.ramp))
        while time.monotonic() < end:
            try:
                outcomes[": ".join(await client.act())] += 1
            except ServerFaultError as error:
                failures.append(str(error))
            await asyncio.sleep(client.rng.expovariate(1 / args.pause) if args.pause else 0)

    await asyncio.gather(*(live(number) for number in range(args.clients)))
    if watch.done():
        failures.append(f"/metrics: {watch.exception()!r}")
    watch.cancel()
    failures += await check_idle(endpoint, process, idle_fds)
    if monitor.longest_stall > args.max_stall:
        failures.append(f"no step for {monitor.longest_stall:.1f} s with requests in flight")
    if monitor.growth() > args.max_growth * 2**20:
        failures.append(f"memory grew by {monitor.growth() / 2**20:.1f} MiB after the first third")
    return {
        "clients": args.clients,
        "minutes": args.minutes,
        "outcomes": dict(sorted(outcomes.items())),
        "most_running": monitor.most_running,
        "most_waiting": monitor.most_waiting,
        "preemptions": monitor.preemptions,
        "longest_stall_seconds": round(monitor.longest_stall, 3),
        "slowest_metrics_seconds": round(monitor.slowest_answer, 3),
        "rss_mib": [round(rss / 2**20, 1) for _, rss in monitor.rss[:: max(1, len(monitor.rss) // 20)]],
        "rss_growth_mib": round(monitor.growth() / 2**20, 1),
        "failures": failures,
    }


async def check_idle(endpoint: Endpoint, process: psutil.Process, idle_fds: int) -> list[str]:
    """What is not as before any client came, once the server has had time to notice that all are gone."""
    problems: list[str] = []
    end = time.monotonic() + 30
    while True:
        metrics = await read_metrics(endpoint)
        busy = {
            name: metrics[name]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            if metrics[name]
        }
        # One connection is the one that asks.
        if fds := max(0, process.num_fds() - idle_fds - 1):
            busy["connections"] = fds
        if not busy or time.monotonic() > end:
            break
        await asyncio.sleep(0.05)
    if busy:
        problems.append(f"30 s after the last client: {busy}")
    response = await endpoint.request("POST", "/v1/completions", b'{"prompt": "Hi", "max_tokens": 4}')
    if response.status != 200:
        problems.append(f"afterwards, a request got status {response.status}")
    return problems


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--clients", type=int, default=256, help="(default: %(default)s)")
    add("--minutes", type=float, default=10.0, help="(default: %(default)s)")
    add("--ramp", type=float, default=5.0, help="seconds in which the clients come (default: %(default)s)")
    add(
        "--pause", type=float, default=0.2, help="mean seconds between a client's acts (default: %(default)s)"
    )
    add("--max-prompt", type=int, default=400, help="words (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    add("--context", type=int, default=8192, help="the server's max_model_len (default: %(default)s)")
    add("--patience", type=float, default=120.0, help="seconds for one request (default: %(default)s)")
    add("--linger", type=float, default=10.0, help="seconds that slow clients stay (default: %(default)s)")
    add("--max-stall", type=float, default=10.0, help="seconds without a step (default: %(default)s)")
    add("--max-growth", type=float, default=16.0, help="MiB (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--log", metavar="FILE", help="where the server logs (default: nowhere)")
    add("serve_arguments", nargs="*", metavar="-- ARGUMENT", help="of rvllm serve")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    with run_server(rvllm_command(args.serve_arguments), args.log) as server:
        report = asyncio.run(load(args, server))
    failures = report["failures"]
    print(
        json.dumps({**report, "failures": failures[:MAX_FAILURES], "num_failures": len(failures)}, indent=2)
    )
    return 1 if failures else 0


if __name__ == "__main__":
    end_servers_on_sigterm()
    sys.exit(main())
