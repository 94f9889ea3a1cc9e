"""Compare rvllm's speed with llama.cpp's, vLLM's or OpenVINO's on one GGUF file, in interleaved pairs of runs.

Each engine has a process of its own, and only one of them works at a time. A pair is a run of rvllm and a run of the
peer, in alternating order; the table shows medians of tokens per second, and of the pairs' ratios with their range.
A first run of every setting of the peer's (flash attention, unified KV cache) is discarded, but chooses the setting
that counts: for prefill, decode and both together, whichever was best. "other load" is what other processes took of
the processors meanwhile: with more than a few percent the figures say little. "same_greedy_tokens" is how far the
engines agree on one answer: few of them make it doubtful that they compute the same model. How to install the peers
is in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import IO, Any, cast

from other_load import OtherLoad, cpu_seconds

from rvllm.benchmark import Workload
from rvllm.cli.bench import add_workload_arguments, batch_sizes, make_workloads, natural, positive
from rvllm.gguf_file import GGUFFile
from rvllm.models import ModelError, resolve_model
from rvllm.system import available_cpus
from rvllm.tokenizer import Tokenizer

WORKER = Path(__file__).resolve().parent / "peers" / "worker.py"
ENGINES = ("llama.cpp", "vllm", "openvino")  # those of worker.py that are compared with
CHECK_PROMPT, CHECK_TOKENS = "The capital of France is", 16
PHASES = ("prefill", "decode", "total")

Seconds = Mapping[str, float]  # by phase
Setting = Mapping[str, object]


class Worker:
    """One engine in its process. Raises RuntimeError with what the engine says when it cannot do something."""

    def __init__(self, python: str, engine: str, options: Mapping[str, object]) -> None:
        self.engine = engine
        self._process = subprocess.Popen(
            [python, str(WORKER), engine, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._requests = cast("IO[str]", self._process.stdin)
        self._answers = cast("IO[str]", self._process.stdout)
        ready = self._answer()
        self.version: str = ready["version"]
        self.settings: list[Setting] = ready["settings"]

    def measure(self, load: Mapping[str, object], setting: Setting) -> Seconds:
        answer = self._ask({"load": load, "setting": setting})
        prefill, decode = answer["prefill_seconds"], answer["decode_seconds"]
        return {"prefill": prefill, "decode": decode, "total": prefill + decode}

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        token_ids: list[int] = self._ask({"prompt": prompt, "num_tokens": num_tokens})["token_ids"]
        return token_ids

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        print(json.dumps(request), file=self._requests, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self.engine} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.engine}: {answer['error']}")
        return answer


def compare(
    ours: Worker, peer: Worker, workload: Workload, pairs: int, copy_prefix: bool = False
) -> dict[str, Any]:
    """Measures one workload; returns a row with tokens per second and ratios by phase."""
    load = {**asdict(workload), "copy_prefix": copy_prefix}
    for setting in ours.settings:
        ours.measure(load, setting)
    trials = [peer.measure(load, setting) for setting in peer.settings]
    best = {phase: min(range(len(trials)), key=lambda i: trials[i][phase]) for phase in PHASES}

    other_load = OtherLoad(lambda: ours.cpu_seconds() + peer.cpu_seconds())
    our_runs: list[Seconds] = []
    peer_runs: list[Seconds] = []
    for pair in range(pairs):
        for worker in (ours, peer) if pair % 2 == 0 else (peer, ours):
            if worker is ours:
                our_runs.append(ours.measure(load, ours.settings[0]))
            else:
                runs = {i: peer.measure(load, peer.settings[i]) for i in sorted(set(best.values()))}
                peer_runs.append({phase: runs[best[phase]][phase] for phase in PHASES})

    num_generated = workload.batch_size * workload.gen_len
    tokens = dict(
        zip(PHASES, (workload.num_prompt_tokens, num_generated, workload.num_kv_tokens), strict=True)
    )
    row: dict[str, Any] = {**asdict(workload), "copy_prefix": copy_prefix, "other_load": other_load.share()}
    for phase in PHASES:
        ratios = [b[phase] / a[phase] for a, b in zip(our_runs, peer_runs, strict=True)]
        row[phase] = {
            "rvllm": median(tokens[phase] / run[phase] for run in our_runs),
            peer.engine: median(tokens[phase] / run[phase] for run in peer_runs),
            "ratio": median(ratios),
            "ratios": ratios,
            "setting": peer.settings[best[phase]],
        }
    return row


def same_greedy_tokens(ours: Worker, peer: Worker, prompt: Sequence[int]) -> int:
    """How many of CHECK_TOKENS the engines agree on before they part; a warning if that is none."""
    answers = (worker.generate(prompt, CHECK_TOKENS) for worker in (ours, peer))
    count = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=True))))
    if not count:
        print(f"warning: {peer.engine} gives another first token: is it the same model?", file=sys.stderr)
    return count


def header(peer: str) -> str:
    phases = (f"{phase} rvllm t/s | {peer} t/s | ratio (min..max)" for phase in PHASES)
    return f"| B | {' | '.join(phases)} | other load | {peer}'s settings |\n|{'---:|' * 11}---|"


def format_row(row: Mapping[str, Any], peer: str) -> str:
    cells = [str(row["batch_size"])]
    for r in (row[phase] for phase in PHASES):
        spread = f"{r['ratio']:.2f} ({min(r['ratios']):.2f}..{max(r['ratios']):.2f})"
        cells += [f"{r['rvllm']:.0f}", f"{r[peer]:.0f}", spread]
    settings = {_format_setting(row[phase]["setting"]): None for phase in PHASES}
    cells += [f"{row['other_load']:.1%}", ", ".join(settings)]
    return f"| {' | '.join(cells)} |"


def _format_setting(setting: Setting) -> str:
    return " ".join(name if value is True else f"no {name}" for name, value in setting.items())


def machine() -> dict[str, object]:
    """What the figures depend on. load_average: of the last minute, before anything ran."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return {"cpu": name, "cpus": available_cpus(), "load_average": os.getloadavg()[0]}


def read_model(path: Path) -> tuple[int, dict[str, int], list[int]]:
    """Size of the vocabulary, number of tensors by type, and token ids to compare answers to."""
    with GGUFFile(path) as gguf:
        embedding = gguf.tensors.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{path}: token_embd.weight: missing")
        types = Counter(tensor.type.name for tensor in gguf.tensors.values())
        return embedding.shape[0], dict(types), Tokenizer.from_gguf(gguf.metadata).encode(CHECK_PROMPT)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", help="a GGUF file, or what `rvllm pull` takes (default: the default model)")
    add("--batch-sizes", type=batch_sizes, default=[1, 4, 8, 16, 32, 64], metavar="N,N,...")
    add_workload_arguments(parser)
    add("--copy-prefix", action="store_true",
        help="let llama.cpp compute the shared prefix once and copy it, as llama-batched-bench -pps; "
        "without it each sequence computes its own, as in llama.cpp's server")  # fmt: skip
    add("--pairs", type=positive, default=5, metavar="N", help="(default: %(default)s)")
    add(
        "-t", "--threads", type=positive, default=available_cpus(), metavar="N", help="(default: %(default)s)"
    )
    add("--isa", help="of rvllm; the peer's is chosen when it is built")
    add("--step-tokens", type=positive, default=512, metavar="N",
        help="prompt tokens in a step: max_num_batched_tokens and n_ubatch (default: %(default)s)")  # fmt: skip
    add("--seed", type=natural, default=0, metavar="N", help="of the prompts")
    add("--peer", choices=ENGINES, default=ENGINES[0], help="(default: %(default)s)")
    add("--peer-python", default=sys.executable, metavar="PATH", help="the interpreter that has the peer")
    add("--peer-model", metavar="PATH",
        help="what the peer loads instead: the same weights, in a folder that was made for it")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    workers: list[Worker] = []
    try:
        if args.copy_prefix and args.peer != "llama.cpp":
            raise ValueError(f"--copy-prefix: {args.peer} shares a prefix by itself")
        workloads = make_workloads(args)
        model = resolve_model(args.model)
        vocab_size, types, prompt = read_model(model)
        largest = max(workloads, key=lambda workload: workload.batch_size)
        options = {
            "model": str(model),
            "vocab_size": vocab_size,
            "threads": args.threads,
            "step_tokens": args.step_tokens,
            "seed": args.seed,
            "load": {**asdict(largest), "copy_prefix": args.copy_prefix},
            "isa": args.isa,
        }
        conditions = {"machine": machine(), "options": options, "tensors": types, "pairs": args.pairs}
        workers += [Worker(sys.executable, "rvllm", options)]
        workers += [Worker(args.peer_python, args.peer, {**options, "model": args.peer_model or str(model)})]
        ours, peer = workers
        conditions["versions"] = [worker.version for worker in workers]
        conditions["same_greedy_tokens"] = f"{same_greedy_tokens(ours, peer, prompt)} of {CHECK_TOKENS}"
        if not args.json:
            print(json.dumps(conditions, indent=2), f"\n{header(peer.engine)}", flush=True)
        rows = []
        for workload in workloads:
            rows.append(compare(ours, peer, workload, args.pairs, args.copy_prefix))
            if not args.json:
                print(format_row(rows[-1], peer.engine), flush=True)
        if args.json:
            print(json.dumps({**conditions, "rows": rows}, indent=2))
        return 0
    except (ModelError, OSError, RuntimeError, ValueError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    sys.exit(main())
