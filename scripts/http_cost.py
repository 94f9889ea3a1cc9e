"""Measure what HTTP costs: output tokens per second of `rvllm serve` against the offline API, on the same prompts.

Both are loaded all the time and take turns. A round has prompts of its own, whose first tokens are the same; both run
at most --concurrency requests at once. The client, on the same processors, is part of the cost. The median of the
rounds' ratios counts. "Other load" is what other processes took of the processors meanwhile.

    python scripts/http_cost.py --concurrency 32 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
from other_load import OtherLoad, cpu_seconds
from server_process import end_servers_on_sigterm, run_server, rvllm_command

from rvllm import LLM, SamplingParams
from rvllm.cli.bench import positive
from rvllm.http_client import Endpoint
from rvllm.load import LoadOptions, drive, first_model, summarize
from rvllm.load_prompts import LoadRequest, RandomPrompts


def offline(llm: LLM, requests: Sequence[LoadRequest]) -> float:
    params = SamplingParams(max_tokens=requests[0].output_len, ignore_eos=True, temperature=0.0)
    start = time.perf_counter()
    outputs = llm.generate([request.prompt for request in requests], params)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


async def over_http(url: str, concurrency: int, requests: Sequence[LoadRequest]) -> float:
    endpoint = Endpoint(url)
    options = LoadOptions(model=await first_model(endpoint), max_concurrency=concurrency, ignore_eos=True)
    results = await drive(endpoint, options, requests, [0.0] * len(requests))
    failed = [result.error for result in results if result.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return float(summarize(results)["output_throughput"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", help="(default: the default model)")
    for name, value in (
        ("concurrency", 32),
        ("num-requests", 64),
        ("prompt-len", 300),
        ("shared-prefix", 200),
        ("output-len", 64),
        ("rounds", 5),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=value, metavar="N", help="(default: %(default)s)"
        )
    args = parser.parse_args()
    prompts = RandomPrompts(
        args.prompt_len - args.shared_prefix, args.output_len, prefix_len=args.shared_prefix
    )
    llm = LLM(args.model, max_num_seqs=args.concurrency)
    command = rvllm_command(
        [*(["-m", args.model] if args.model else []), "--max-num-seqs", str(args.concurrency)]
    )
    ratios = []
    with run_server(command) as server:
        load = OtherLoad(lambda: cpu_seconds(server.pid))
        for i in range(args.rounds + 1):
            requests = prompts.sample(args.num_requests, np.random.default_rng(i))
            speeds = {}
            for way in ("offline", "http") if i % 2 else ("http", "offline"):
                speeds[way] = (
                    offline(llm, requests)
                    if way == "offline"
                    else asyncio.run(over_http(server.url, args.concurrency, requests))
                )
            if i:  # the first round warms up
                ratios.append(speeds["http"] / speeds["offline"])
                print(
                    f"round {i}: offline {speeds['offline']:.1f}, HTTP {speeds['http']:.1f} tok/s, {ratios[-1]:.3f}"
                )
        print(f"HTTP / offline: {median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})")
        print(f"other load: {load.share():.1%}")
    return 0


if __name__ == "__main__":
    end_servers_on_sigterm()
    sys.exit(main())
