"""Measure the CUDA backend on a GPU and print the parts of docs/gpu_results.md; scripts/gpu_check.sh runs it.

gpu_report.py compare            each operation: GPU against emulator
gpu_report.py tokens MODEL...    greedy tokens of the GPU against the CPU's
gpu_report.py speed MODEL        prefill and decode at 1 to 256 requests, and each kernel's share of a step
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/emu"))

from gguf import GGMLQuantizationType as GGMLType
from random_weights import BLOCK_FIELDS, random_weights
from reference import UNGATED

from rvllm import LLM, SamplingParams, _core
from rvllm._core import ops
from rvllm.benchmark import Benchmark, Workload
from rvllm.cuda import cublas_libraries, import_cuda
from rvllm.gguf_file import GGUFFile

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROFILED = (1, 64)
PROMPT_LEN, GEN_LEN = 512, 128
PROFILED_LEN = 32  # decode steps of a profile
NUM_TOKENS = 16
# Of the GPU, for which work is cut: all, and so few that products of 24 tokens take each kernel of many.
PROCESSORS = (0, 2, 1)

Array = NDArray[np.float32]


class Operation(NamedTuple):
    name: str
    run: Callable[[Any], Array]
    is_exact: bool = True  # has the emulator's bits; cuBLAS has an order of its own


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def operations() -> Iterator[Operation]:
    """One call of every kernel, at sizes that an emulator runs in a second."""
    for kind in [GGMLType.F32, GGMLType.F16, GGMLType.BF16, *BLOCK_FIELDS]:
        weight = random_weights(kind, 128, 1024, 0.05, np.random.default_rng(1)).tobytes()
        for rows in (1, 24):
            x = normal(rows, 1024, seed=rows)
            yield Operation(
                f"linear {kind.name}, {rows} rows",
                lambda b, kind=kind, weight=weight, x=x: ops.linear(b, int(kind), 128, weight, x),
                rows == 1 or kind not in (GGMLType.F16, GGMLType.BF16),
            )
    x, weight = normal(8, 2048), normal(2048, seed=1)
    for name, value in ops.NormKind.__members__.items():
        yield Operation(f"norm {name}", lambda b, v=value: ops.norm(b, x, weight, 1e-5, None, v))
    cos_sin = normal(8, 64, seed=2)
    for interleaved in (False, True):
        yield Operation(
            f"rope, interleaved {interleaved}", lambda b, i=interleaved: ops.rope(b, x, 64, cos_sin, i)
        )
    eye = np.eye(1024, dtype=np.float32).tobytes()
    for name, value in ops.Activation.__members__.items():
        width = 1024 if name in UNGATED else 2048
        yield Operation(
            f"activation {name}",
            lambda b, v=value, w=width: ops.activated_linear(
                b, int(GGMLType.F32), 1024, eye, 3 * x[:1, :w], v
            ),
        )
    yield Operation("add", lambda b: ops.add(b, x, normal(8, 2048, seed=3), 0.22))
    yield Operation("scale_logits", lambda b: ops.scale_logits(b, 100 * x, 0.5, 30.0))
    for kv_type in _core.KVType.__members__.values():
        yield Operation(f"attention {kv_type.name}", lambda b, kv_type=kv_type: attend(b, kv_type))


def attend(backend: Any, kv_type: Any) -> Array:
    """Two requests: a prompt of 40 tokens, and one token with a context of 600."""
    heads, kv_heads, dim, block_size, contexts, queries = 8, 2, 64, 16, (40, 600), (40, 600)
    num_tokens, width = sum(contexts), 38
    tables = np.random.default_rng(5).permutation(2 * width).astype(np.int32).reshape(2, width)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in contexts])
    request = np.repeat([0, 1], contexts)
    slots = tables[request, positions // block_size] * block_size + positions % block_size
    q, k, v = (normal(num_tokens, h * dim, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    return ops.attention(
        backend, q, k, v, positions, slots, np.cumsum([0, *queries]), np.array(contexts), tables, tables.size,
        block_size, heads, kv_heads, 0, dim**-0.5, 0.0, kv_type,
    )  # fmt: skip


def compare() -> int:
    """The emulator models the arithmetic of a GPU: what differs here, it does not model. 1: something exact does."""
    from devices import emulated_module

    gpus = [import_cuda().make_backend(1, cublas_libraries(), num_processors=n) for n in PROCESSORS]
    emulator = emulated_module().make_backend(1)
    print(f"Different: with work cut for {', '.join(str(n or 'all') for n in PROCESSORS)} processors.\n")
    print("| operation | elements | different | largest difference | of the largest value |")
    print("|---|---|---|---|---|")
    wrong = 0
    for operation in operations():
        here, there = np.stack([operation.run(gpu) for gpu in gpus]), operation.run(emulator)
        error = float(np.abs(here - there).max())
        different = [int((h.view(np.uint32) != there.view(np.uint32)).sum()) for h in here]
        share = error / float(np.abs(there).max())
        counts = ", ".join(map(str, different))
        print(f"| {operation.name} | {there.size} | {counts} | {error:.2g} | {share:.2g} |", flush=True)
        wrong += operation.is_exact and any(different)
    print(f"\nOperations that must have the emulator's bits and do not: {wrong}.")
    return int(wrong > 0)


def greedy(llm: LLM, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in (1, 16, 33, 64)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def tokens(models: list[Path]) -> int:
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "num_blocks": 64}
    status = 0
    print("| model | equal tokens | seconds on the CPU, on the GPU |")
    print("|---|---|---|")
    for model in models:
        answers, seconds = [], []
        for device in ("cpu", "cuda"):
            llm = LLM(model, device=device, **settings)
            start = time.perf_counter()
            answers.append(greedy(llm, llm.engine.runner.vocab_size))
            seconds.append(time.perf_counter() - start)
            del llm
        pairs = [pair for one, other in zip(*answers, strict=True) for pair in zip(one, other, strict=True)]
        equal = sum(a == b for a, b in pairs)
        if is_quantized(model):  # others are multiplied by cuBLAS, in its own order
            status |= equal != len(pairs)
        print(f"| {model.stem} | {equal} of {len(pairs)} | {seconds[0]:.1f}, {seconds[1]:.1f} |", flush=True)
    return status


def weight_bytes(model: Path) -> tuple[int, float]:
    """(bytes that every step reads of the weights, multiply-accumulates with them for a token of a prompt).

    The output matrix, which is tied, multiplies the last token of a prompt alone.
    """
    with GGUFFile(model) as file:
        matrices = {t.name: t for t in file.tensors.values() if len(t.shape) == 2}
    macs = {name: float(np.prod(t.shape)) for name, t in matrices.items()}
    macs["token_embd.weight"] /= PROMPT_LEN
    return sum(t.data.size for t in matrices.values()), sum(macs.values())


def is_quantized(model: Path) -> bool:
    with GGUFFile(model) as file:
        return any(t.type_id in BLOCK_FIELDS for t in file.tensors.values())


def kernel_name(key: str) -> str:
    """Of a C++ function, without its result, namespaces, template arguments and parameters."""
    key = key.replace("(anonymous namespace)::", "")
    return key.split("<")[0].split("(")[0].split("::")[-1].removeprefix("void ").strip()


def kernel_seconds(benchmark: Benchmark, workload: Workload) -> dict[str, float]:
    """Device time of a run by kernel, as CUPTI measures it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        benchmark.measure(workload)
    times: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        times[kernel_name(event.key)] += event.self_device_time_total * 1e-6
    return dict(times)


def cublas_bf16_macs_per_second() -> float:
    """What cuBLAS reaches with a large product in bf16: the yardstick of prefill."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times, products = [], 20
    for _ in range(20):  # half of them, some 0.3 s, to bring the clock up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(products):
            a @ b
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / products)
    return 8192**3 / statistics.median(times[10:])


def make_llm(model: Path, **settings: Any) -> LLM:
    return LLM(
        model, device="cuda", max_model_len=PROMPT_LEN + 2 * GEN_LEN + 64, max_num_seqs=256,
        max_num_batched_tokens=2048, enable_prefix_caching=False, **settings,
    )  # fmt: skip


def measure(benchmark: Benchmark, workload: Workload) -> dict[str, float]:
    """Of steps that are replayed: the first run notes them, the second captures them as graphs."""
    benchmark.measure(workload, repeat=2)
    return benchmark.measure(workload, repeat=3 if workload.batch_size <= 16 else 1).row()


def measure_f16_prefill(model: Path, macs: float, yardstick: float) -> None:
    benchmark, workload = (
        Benchmark(make_llm(model, prefill_compute="f16").engine),
        Workload(16, PROMPT_LEN, 1),
    )
    rate = measure(benchmark, workload)["S_PP"]
    print(f"\nWith --prefill-compute f16, {workload.batch_size} requests: prefill {rate:.0f} tok/s,", end=" ")
    print(f"{rate * macs / yardstick:.0%} of cuBLAS's bf16.", flush=True)


def measure_model(model: Path, yardstick: float, deadline: float) -> None:
    num_bytes, macs = weight_bytes(model)
    llm = make_llm(model)
    bandwidth, _ = _core.ProfiledBackend(llm.engine.runner.backend).measure_ceilings()
    print(f"Memory, read and written by a copy: {bandwidth / 1e12:.2f} TB/s.", end=" ")
    print(f"cuBLAS in bf16: {2 * yardstick / 1e12:.0f} TFLOP/s.\n")
    print("| requests | prefill tok/s | of cuBLAS's bf16 | decode tok/s | weights read, of the bandwidth |")
    print("|---|---|---|---|---|")
    benchmark = Benchmark(llm.engine)
    for batch_size in BATCH_SIZES:
        if time.perf_counter() > deadline:
            print(f"\nNo time was left for {batch_size} requests and more.")
            break
        row = measure(benchmark, Workload(batch_size, PROMPT_LEN, GEN_LEN))
        flops = row["S_PP"] * macs / yardstick
        read = num_bytes * row["S_TG"] / batch_size / bandwidth
        print(
            f"| {batch_size} | {row['S_PP']:.0f} | {flops:.0%} | {row['S_TG']:.0f} | {read:.0%} |", flush=True
        )
    del benchmark, llm  # the memory of its weights and of its cache
    gc.collect()
    if is_quantized(model) and time.perf_counter() < deadline:
        measure_f16_prefill(model, macs, yardstick)
        gc.collect()
    profile_model(model)  # last: CUPTI stays and slows what follows


def profile_model(model: Path) -> None:
    benchmark = Benchmark(make_llm(model).engine)
    for batch_size in PROFILED:
        workload = Workload(batch_size, PROMPT_LEN, PROFILED_LEN)
        benchmark.measure(workload, repeat=2)
        times = kernel_seconds(benchmark, workload)
        total = sum(times.values())
        if total == 0:
            print(f"\nThe profiler saw no kernel with {batch_size} requests.", flush=True)
            continue
        print(
            f"\nDevice time with {batch_size} requests ({PROMPT_LEN} + {PROFILED_LEN} tokens), {total:.3f} s:\n"
        )
        print("| kernel | share |\n|---|---|")
        for name, spent in sorted(times.items(), key=lambda item: -item[1])[:12]:
            print(f"| {name} | {spent / total:.1%} |", flush=True)


def speed(model: Path, seconds: float) -> int:
    deadline = time.perf_counter() + seconds
    measure_model(model, cublas_bf16_macs_per_second(), deadline)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("compare", "tokens", "speed"))
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files")
    parser.add_argument(
        "--seconds", type=float, default=150, help="after which speed starts no other batch size"
    )
    args = parser.parse_intermixed_args(argv)  # models also after --seconds
    if args.part == "compare":
        return compare()
    if args.part == "tokens":
        return tokens(args.models)
    if len(args.models) != 1:
        parser.error(f"speed takes one model, not {len(args.models)}")  # its profiler would slow the next
    return speed(args.models[0], args.seconds)


if __name__ == "__main__":
    sys.exit(main())
