"""Check over HTTP that a request has the same answer alone and in any company, to the byte.

Each of several requests (sampled with a seed, greedy with logprobs, a streamed chat, a long prompt, two choices, a
schema) is sent alone, then in each round among 1, 3, 7, 15, 31 and 63 others, which are a mixture of everything: other
seeds and none, greedy ones, prompts of 300 tokens, biases, penalties, schemas, and clients that go away. What is
compared is "choices", with texts, logprobs and reasons. The server is the one at --base-url, or `rvllm serve` with the
arguments after --.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
from typing import Any

from server_process import end_servers_on_sigterm, run_server, rvllm_command

from rvllm.http_client import Endpoint
from rvllm.load_prompts import WORDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "item",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
            "required": ["name", "count"],
            "additionalProperties": False,
        },
    },
}


def words(count: int, seed: object) -> str:
    return " ".join(random.Random(f"{seed}").choices(WORDS, k=count))


def checked_requests(max_tokens: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name, path and body."""
    chat = {"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": max_tokens}
    text = {"prompt": "Name three colours:", "max_tokens": max_tokens}
    return {
        "seeded": (COMPLETIONS, {**text, "seed": 42, "temperature": 0.8}),
        "greedy": (COMPLETIONS, {**text, "temperature": 0, "logprobs": 5}),
        "hot": (COMPLETIONS, {**text, "seed": 1, "temperature": 2.0, "top_p": 0.9, "frequency_penalty": 0.5}),
        "two choices": (COMPLETIONS, {**text, "seed": 7, "temperature": 1.0, "n": 2}),
        "long": (
            COMPLETIONS,
            {"prompt": words(250, "long"), "max_tokens": max_tokens, "seed": 3, "temperature": 1.0},
        ),
        "chat": (CHAT, {**chat, "seed": 5, "temperature": 0.8, "stream": True}),
        "schema": (CHAT, {**chat, "seed": 6, "temperature": 1.0, "response_format": SCHEMA}),
    }


def other_request(rng: random.Random, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """One of a mixture of everything."""
    text: dict[str, Any] = {"prompt": words(rng.randint(1, 60), rng.random()), "temperature": 1.0}
    chat = {"messages": [{"role": "user", "content": text["prompt"]}], "temperature": 1.0}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, text),
        (COMPLETIONS, {**text, "seed": rng.randrange(10**6), "n": 2}),
        (COMPLETIONS, {**text, "temperature": 0, "logprobs": 3}),
        (COMPLETIONS, {**text, "prompt": words(300, rng.random())}),
        (COMPLETIONS, {**text, "logit_bias": {"33": 5.0}, "presence_penalty": 1.0, "min_p": 0.05}),
        (COMPLETIONS, {**text, "prompt": "Name three colours:", "seed": 43}),
        (CHAT, {**chat, "stream": True}),
        (CHAT, {**chat, "response_format": SCHEMA}),
    ]
    path, fields = rng.choice(kinds)
    return path, {**fields, "max_tokens": rng.randint(1, 2 * max_tokens)}


async def send(endpoint: Endpoint, path: str, fields: dict[str, Any]) -> str:
    """The choices as JSON, those of a stream put together. Raises ValueError for an error."""
    events: list[bytes] = []
    response = await endpoint.request("POST", path, json.dumps(fields).encode(), events.append)
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.body[:300]!r}")
    if not fields.get("stream"):
        return json.dumps(json.loads(response.body)["choices"], sort_keys=True, ensure_ascii=False)
    deltas = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in deltas)
    return json.dumps([text, [choice["finish_reason"] for choice in deltas if choice["finish_reason"]]])


async def crowd(endpoint: Endpoint, rng: random.Random, count: int, max_tokens: int) -> None:
    """Others at the same time; one in ten goes away early."""

    async def one(path: str, fields: dict[str, Any], seconds: float | None) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(send(endpoint, path, fields), seconds)

    await asyncio.gather(
        *(
            one(*other_request(rng, max_tokens), rng.uniform(0, 1) if rng.random() < 0.1 else None)
            for _ in range(count)
        )
    )


async def check(
    endpoint: Endpoint, crowds: list[int], rounds: int, max_tokens: int, only: list[str], seed: int = 0
) -> list[str]:
    """What differed."""
    rng = random.Random(seed)
    requests = {name: r for name, r in checked_requests(max_tokens).items() if not only or name in only}
    alone = {name: await send(endpoint, *request) for name, request in requests.items()}
    differences = []
    for round_number in range(rounds):
        for count in crowds:
            others = asyncio.create_task(crowd(endpoint, rng, count, max_tokens))
            await asyncio.sleep(rng.uniform(0, 0.2))
            answers = await asyncio.gather(*(send(endpoint, *request) for request in requests.values()))
            await others
            differences += [
                f"round {round_number + 1}, among {count}: {name} is {answer}, alone {alone[name]}"
                for name, answer in zip(requests, answers, strict=True)
                if answer != alone[name]
            ]
    return differences


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base-url", help="of a server that runs already")
    add("--crowds", type=int, nargs="+", default=[1, 3, 7, 15, 31, 63], metavar="N")
    add("--rounds", type=int, default=5, metavar="N")
    add("--max-tokens", type=int, default=48, metavar="N")
    add("--only", nargs="+", default=[], metavar="NAME", help="check these requests alone")
    add("serve_arguments", nargs="*", metavar="-- ARGUMENT", help="of rvllm serve")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        url = args.base_url or stack.enter_context(run_server(rvllm_command([*args.serve_arguments]))).url
        differences = asyncio.run(check(Endpoint(url), args.crowds, args.rounds, args.max_tokens, args.only))
    print("\n".join(differences) or "all the same")
    return 1 if differences else 0


if __name__ == "__main__":
    end_servers_on_sigterm()
    sys.exit(main())
