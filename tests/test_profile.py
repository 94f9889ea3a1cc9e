"""The profiler: what it counts is exact, times nest, and whoever does not ask for it does not meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import VOCAB, write_tiny_model

from rvllm import LLM, SamplingParams, _core
from rvllm.cli import main
from rvllm.engine import LLMEngine

LAYERS, HIDDEN, FF, HEADS, KV_HEADS, HEAD_DIM = 3, 64, 96, 4, 2, 16
PROMPTS = [list(range(n, 2 * n)) for n in (5, 17, 40)]  # none begins like another
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, quant="Q4_1", layers=LAYERS)
    return path


def make_llm(path: Path, **settings: Any) -> LLM:
    return LLM(
        path, **{"num_blocks": 64, "num_threads": 2, "seed": 0, "max_num_batched_tokens": 32, **settings}
    )


@pytest.fixture(scope="module")
def profiled(path: Path) -> LLM:
    """After PROMPTS have run."""
    llm = make_llm(path, profile=True)
    llm.generate(PROMPTS, GREEDY)
    return llm


def num_forward_tokens() -> int:
    return sum(len(prompt) + GREEDY.max_tokens - 1 for prompt in PROMPTS)


def test_answers_are_those_of_an_engine_that_is_not_profiled(path: Path) -> None:
    plain, profiled = make_llm(path), make_llm(path, profile=True)
    assert plain.profile is None
    assert type(plain.engine) is LLMEngine
    assert type(plain.engine.runner.backend) is _core.CpuBackend  # nothing stands between
    tokens = [[o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] for llm in (plain, profiled)]
    assert tokens[0] == tokens[1]


def test_calls_bytes_and_operations_are_exact(profiled: LLM) -> None:
    profile = profiled.profile
    assert profile is not None
    operations = {op.name: op for op in profile.operations()}
    steps, tokens = profile.num_native_calls, num_forward_tokens()
    assert profile.num_tokens == tokens
    assert steps == profiled.engine.stats.steps
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "attn_q": (q + 2 * kv, HIDDEN),
        "attn_output": (HIDDEN, q),
        "ffn_gate": (2 * FF, HIDDEN),
        "ffn_down": (HIDDEN, FF),
    }
    for name, (n, k) in shapes.items():
        linear = operations[f"linear {name}"]
        assert linear.calls == steps * LAYERS
        assert linear.macs == tokens * LAYERS * n * k
        assert linear.num_bytes == linear.calls * n * k * 20 / 32  # Q4_1: 20 bytes for 32 weights
    assert operations["linear token_embd"].macs == len(PROMPTS) * GREEDY.max_tokens * VOCAB * HIDDEN
    assert operations["rope"].calls == 2 * steps * LAYERS
    assert operations["sampling"].calls == operations["argmax"].calls <= steps
    # Position p sees p + 1 positions; a multiply for the score and one for the value.
    seen = sum((n + GREEDY.max_tokens - 1) * (n + GREEDY.max_tokens) // 2 for n in map(len, PROMPTS))
    assert operations["paged_attention"].macs == LAYERS * seen * q * 2
    kv_bytes = profiled.engine.runner.kv_bytes_per_block // 16
    assert operations["store_kv"].num_bytes == tokens * kv_bytes


def test_times_nest(profiled: LLM) -> None:
    profile = profiled.profile
    assert profile is not None
    operations = profile.operations()
    assert [op.seconds for op in operations] == sorted((op.seconds for op in operations), reverse=True)
    in_operations = sum(op.seconds for op in operations)
    assert 0 < in_operations <= profile.native_seconds <= profile.seconds
    assert profile.python_share == pytest.approx(1 - profile.native_seconds / profile.seconds)
    for op in operations:
        assert len(op.busy_seconds) == 2
        assert all(0 <= busy <= op.seconds for busy in op.busy_seconds)


def test_ceilings(profiled: LLM) -> None:
    profile = profiled.profile
    assert profile is not None
    assert 1e8 < profile.bytes_per_second < 1e13
    assert 1e7 < profile.macs_per_second < 1e15


def test_table_adds_up(profiled: LLM) -> None:
    profile = profiled.profile
    assert profile is not None
    lines = profile.table().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("operation")) + 1
    rows = {line[:22].strip(): line[30:].split() for line in lines[first : lines.index("", first)]}
    rest = [line for line in lines if line.startswith(("rest of", "Python", "total"))]
    assert len(rows) == len(profile.operations()) + len(rest) == len(profile.operations()) + 3
    seconds = {name: float(cells[0]) for name, cells in rows.items()}
    total = seconds.pop("total")
    assert total > 0
    assert sum(seconds.values()) == pytest.approx(total, abs=1e-4 * len(rows))  # as printed
    threads = lines[lines.index("", first) + 2 :]
    assert [line.split()[0] for line in threads] == ["0", "1"]


def test_reset(path: Path) -> None:
    llm = make_llm(path, profile=True)
    profile = llm.profile
    assert profile is not None
    assert profile.operations() == []  # loading the weights does not count
    llm.generate(PROMPTS[:1], GREEDY)
    profile.reset_totals()
    assert profile.operations() == []
    assert (profile.seconds, profile.native_seconds, profile.num_tokens) == (0, 0, 0)
    assert len(profile.backend.thread_slices()[0][0]) > 0  # for the trace
    profile.reset()
    assert len(profile.backend.thread_slices()[0][0]) == 0
    llm.get_logits(PROMPTS[1])
    assert profile.num_tokens == len(PROMPTS[1])
    assert profile.seconds >= profile.native_seconds > 0


def test_trace_nests_steps_native_calls_operations_and_work(profiled: LLM, tmp_path: Path) -> None:
    profile = profiled.profile
    assert profile is not None
    profile.write_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"] == {"num_lost": 0}
    events = trace["traceEvents"]
    assert sum(event["ph"] == "M" for event in events) == 3  # the process and two threads
    slices = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in slices) == 0

    def covers(outer: dict[str, Any], inner: dict[str, Any], slack: float = 0.002) -> bool:
        """slack: in microseconds, which have three digits here."""
        start, stop = inner["ts"], inner["ts"] + inner["dur"]
        return bool(outer["ts"] <= start + slack and stop <= outer["ts"] + outer["dur"] + slack)

    by_kind = Counter((event["cat"], event["tid"]) for event in slices)
    assert by_kind["operation", 0] == sum(op.calls for op in profile.operations())
    natives = [event for event in slices if event["name"].startswith("native")]
    steps = [event for event in slices if event["name"] == "step"]
    operations = [event for event in slices if event["cat"] == "operation"]
    assert len(natives) == len(steps) == profile.num_native_calls
    for outer, inner in ((steps, natives), (natives, operations), (operations, operations)):
        assert all(any(covers(a, b) for a in outer) for b in inner)
    for event in slices:
        if event["cat"] == "work":
            assert event["tid"] == 1
            # Two processors' counters may differ a little, most of all in a virtual machine.
            assert any(covers(a, event, slack=20.0) and a["name"] == event["name"] for a in operations)


def test_generate_reports_on_standard_error(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*options: str) -> tuple[str, str]:
        assert (
            main(["generate", "-m", str(path), "-p", "abc", "-n", "3", "--num-blocks", "64", *options]) == 0
        )
        return capsys.readouterr()

    plain, err = run()
    assert "profile" not in err
    out, err = run("--profile")
    assert out == plain
    assert "linear ffn_gate" in err
    out, err = run("--profile-trace", str(tmp_path / "trace.json"))
    assert out == plain
    assert "linear" not in err
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_bench_reports_each_batch_size_without_its_warm_up(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    options = ["--num-blocks", "64", "--batch-sizes", "1,2", "-npp", "8", "-ntg", "4", "--repeat", "1"]
    assert main(["bench", "-m", str(path), *options, "--profile", "--profile-trace", str(trace)]) == 0
    err = capsys.readouterr().err
    assert "B = 1, 1 runs: profile: 5 native calls, 12 tokens" in err
    assert "B = 2, 1 runs: profile: 5 native calls, 24 tokens" in err
    natives = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"].startswith("native")]
    assert len(natives) == 4 * 5  # warm-ups too


def test_trace_that_cannot_be_written_is_refused_before_the_work(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", str(path), "-p", "abc", "--profile-trace", str(tmp_path)]) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"rvllm: error: {tmp_path}: Is a directory"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file")
def test_kernels_have_names_for_other_profilers() -> None:
    names = Path(_core.__file__).read_bytes()
    assert b"linear_quantized" in names
    assert b"attend_partition" in names


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space")
def test_threads_that_cannot_be_started_are_an_error(tmp_path: Path) -> None:
    code = """if True:
        import resource, rvllm._core as core
        core.CpuBackend(1)
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            core.CpuBackend(64)
        except RuntimeError as error:
            print(error)
    """
    # Not in the checkout, whose package may not be compiled.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cannot start thread ")
    assert " of 64: " in done.stdout
    assert done.stdout.count("\n") == 1


def test_full_disk_for_the_trace_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "-m", str(path), "-p", "abc", "--num-blocks", "9", "--profile-trace", "/dev/full"]
    assert main(argv) == 1
    assert capsys.readouterr().err == "rvllm: error: cannot write /dev/full: No space left on device\n"
