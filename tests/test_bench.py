"""rvllm bench: what is counted, what is printed, what is refused. How fast it is is not tested."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from fake_engine import assert_usable, make_engine
from tiny_gguf import write_tiny_model

from rvllm.benchmark import Benchmark, Workload, random_prompts
from rvllm.cli import main
from rvllm.trace import Trace, TraceEntry, parse_trace

COLUMNS = ["PP", "TG", "B", "N_KV", "T_PP", "S_PP", "T_TG", "S_TG", "T", "S", "HIT", "KV"]
HEADINGS = [
    "PP",
    "TG",
    "B",
    "N_KV",
    "T_PP s",
    "S_PP t/s",
    "T_TG s",
    "S_TG t/s",
    "T s",
    "S t/s",
    "HIT %",
    "KV %",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


Bench: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], model: Path) -> Bench:
    """Exit status, standard output and standard error of a run; blocks of 16 tokens, contexts of 512."""

    def run(*argv: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        options = ("-m", model, "--num-blocks", "256", "--repeat", "1", *argv)
        status = main(["bench", *map(str, options)])
        return status, *capsys.readouterr()

    return run


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# The sweep


def test_table(bench: Bench) -> None:
    status, out, err = bench("--batch-sizes", "1,3", "--prompt-len", "20", "--gen-len", "5")
    header, rule, *rows = out.splitlines()
    assert (status, err, len(rows)) == (0, "", 2)
    assert cells(header) == HEADINGS
    assert set(rule) == {"|", "-"} and len(rule) == len(header)
    assert [cells(row)[:4] for row in rows] == [["20", "5", "1", "25"], ["20", "5", "3", "75"]]


def test_rows_add_up(bench: Bench) -> None:
    status, out, err = bench("-npl", "4", "-npp", "33", "-ntg", "7", "--json")
    (row,) = json.loads(out)
    assert (status, err, list(row)) == (0, "", COLUMNS)
    assert [row[key] for key in ("PP", "TG", "B", "N_KV", "HIT")] == [33, 7, 4, 160, 0]
    assert row["T"] == pytest.approx(row["T_PP"] + row["T_TG"])
    assert row["S_PP"] == pytest.approx(4 * 33 / row["T_PP"])
    assert row["S_TG"] == pytest.approx(4 * 7 / row["T_TG"])
    assert row["S"] == pytest.approx(160 / row["T"])
    assert row["KV"] == pytest.approx(4 * 3 / 256)  # 40 tokens and a spare one each


@pytest.mark.parametrize("depth", [0, 32])
def test_shared_prefix(bench: Bench, depth: int) -> None:
    _, out, _ = bench(
        "-npl", "4", "-npp", "40", "-ntg", "4", "--shared-prefix", "36", "--depth", depth, "--json"
    )
    (row,) = json.loads(out)
    assert row["N_KV"] == 36 + 4 * (40 - 36 + 4)
    assert row["HIT"] == 3 * 32 / (4 * 40)  # whole blocks, of all but the first prompt
    assert row["S_PP"] == pytest.approx((36 + 4 * 4) / row["T_PP"])


def test_no_prefix_caching_finds_nothing(bench: Bench) -> None:
    _, out, _ = bench("-npl", "2", "--shared-prefix", "100", "-ntg", "2", "--no-prefix-caching", "--json")
    assert json.loads(out)[0]["HIT"] == 0


def test_depth_is_not_counted(bench: Bench) -> None:
    _, out, _ = bench("-npl", "2", "-npp", "20", "-ntg", "4", "--depth", "64", "--json")
    (row,) = json.loads(out)
    assert [row[key] for key in ("PP", "N_KV", "HIT")] == [20, 48, 0]
    assert row["KV"] == 2 * 6 / 256


def test_more_requests_than_run_by_default(bench: Bench) -> None:
    status, out, _ = bench("-npl", "70", "-npp", "2", "-ntg", "2", "--json")
    assert (status, json.loads(out)[0]["B"]) == (0, 70)


def steps_of(benchmark: Benchmark, workload: Workload) -> list[list[int]]:
    """Numbers of tokens of the requests in each step of one run."""
    steps = benchmark.engine.runner.steps  # type: ignore[attr-defined]
    steps.clear()
    benchmark.measure(workload)
    return [[count for _, _, count in step] for step in steps]


def test_all_are_prefilled_then_decoded_together() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    steps = steps_of(Benchmark(engine), Workload(batch_size=4, prompt_len=10, gen_len=6))
    assert sum(map(sum, steps[:-6])) >= 4 * 10
    assert steps[-6:] == [[1, 1, 1, 1]] * 6
    assert all(max(step) > 1 for step in steps[:-6])
    assert_usable(engine)


def test_context_is_computed_once() -> None:
    benchmark = Benchmark(make_engine())
    workload = Workload(batch_size=2, prompt_len=5, gen_len=3, depth=16)
    assert steps_of(benchmark, workload)[0] == [16, 16]
    context, prefill, *decode = steps_of(benchmark, workload)
    assert context == [4, 4]  # the last block: a token at least is computed
    assert prefill == [5, 5] and decode == [[1, 1]] * 3


def test_each_run_has_its_own_prompts() -> None:
    engine = make_engine()
    assert Benchmark(engine).measure(Workload(2, 30, 2), repeat=3).hit_rate == 0


def test_random_prompts() -> None:
    first, second, third = random_prompts(np.random.default_rng(0), 1000, [8, 5, 2], shared_prefix=4)
    assert [len(first), len(second), len(third)] == [8, 5, 2]
    assert first[:4] == second[:4] and first[:2] == third and first[4] != second[4]


@pytest.mark.parametrize(
    ("workload", "config", "message"),
    [
        (Workload(4, 10, 4), {"max_num_seqs": 3}, "batch size 4 is more than max_num_seqs 3"),
        (Workload(4, 10, 4), {"max_num_batched_tokens": 4}, "less than max_num_batched_tokens 4"),
        (Workload(2, 10, 4, depth=6), {}, "depth 6 is no multiple of the block size 4"),
        (Workload(2, 10, 4, depth=8), {"enable_prefix_caching": False}, "depth needs prefix caching"),
        (Workload(2, 400, 120), {}, "more than max_model_len 512"),
        (Workload(2, 40, 20), {"num_blocks": 24}, "2 requests of 60 tokens do not fit the KV cache of 96"),
        (Workload(2, 40, 2), {"num_blocks": 20}, "2 requests of 42 tokens do not fit the KV cache of 80"),
        (Workload(3, 4, 2, depth=40), {"num_blocks": 30}, "3 requests of 46 tokens do not fit"),
        (Workload(1, 50, 20), {"num_blocks": 16}, "KV-cache blocks"),
    ],
)
def test_what_cannot_run_together_is_refused(
    workload: Workload, config: dict[str, int], message: str
) -> None:
    engine = make_engine(**config)
    with pytest.raises(ValueError, match=message):
        Benchmark(engine).measure(workload)
    assert engine.stats.free_blocks == engine.stats.num_blocks and not engine.has_unfinished


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1, 1), "batch_size must be at least 1, got 0"),
        ((1, 0, 1), "prompt_len must be at least 1, got 0"),
        ((1, 1, 0), "gen_len must be at least 1, got 0"),
        ((1, 1, 1, -1), "depth must be at least 0, got -1"),
        ((1, 1, 1, 0, 2), "shared_prefix must be between 0 and prompt_len 1, got 2"),
    ],
)
def test_bad_workloads_are_refused(values: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(*values)


# Traces

TRACE = """
{"prompt_len": 30, "gen_len": 4, "arrival_step": 2}
{"prompt_len": 10, "gen_len": 6}

{"prompt_len": 8, "gen_len": 1, "arrival_step": 500}
"""


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


def test_trace(bench: Bench, trace_file: Path) -> None:
    status, out, err = bench("--trace-file", trace_file, "--json")
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert [result[key] for key in ("PP", "TG", "B", "STEPS", "HIT", "PREEMPTIONS")] == [48, 11, 3, 7, 0, 0]
    assert result["S"] == pytest.approx(59 / result["T"]) and result["S_TG"] == pytest.approx(
        11 / result["T"]
    )
    rows = result["requests"]
    assert [(r["PP"], r["TG"], r["ARRIVAL"], r["STEPS"]) for r in rows] == [
        (30, 4, 2, 4), (10, 6, 0, 6), (8, 1, 500, 1)
    ]  # fmt: skip
    assert all(0 < r["T_FIRST"] <= r["T"] <= result["T"] for r in rows)
    assert rows[2]["T_FIRST"] == rows[2]["T"]


def test_trace_as_text(bench: Bench, trace_file: Path) -> None:
    _, out, _ = bench("--trace-file", trace_file, "--shared-prefix", "16")
    lines = out.splitlines()
    assert cells(lines[0]) == ["PP", "TG", "ARRIVAL", "STEPS", "T_FIRST s", "T s"]
    assert cells(lines[2])[:4] == ["30", "4", "2", "4"]
    assert "3 requests, 48 prompt and 11 generated tokens" in out and "t/s" in out
    assert (
        "0.0 % of the prompts found" in out
    )  # the prompts that have it all hold less than a block beyond it


def test_waiting_counts_as_latency() -> None:
    engine = make_engine(max_num_seqs=1)
    result = Trace(engine, [TraceEntry(4, 3), TraceEntry(4, 2)]).measure()
    assert [request.num_steps for request in result.requests] == [3, 5]
    assert result.num_steps == 5
    assert_usable(engine)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (TraceEntry(510, 3), "request 2: 513 tokens are more than max_model_len 512"),
        (TraceEntry(100, 30), "request 2: .* KV-cache blocks"),
    ],
)
def test_trace_that_does_not_fit_is_refused(entry: TraceEntry, message: str) -> None:
    engine = make_engine(num_blocks=32)
    with pytest.raises(ValueError, match=message):
        Trace(engine, [TraceEntry(4, 2), entry]).measure()
    assert_usable(engine)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests in it"),
        ("\n{", "line 2: it is not JSON"),
        ("[" * 100_000, "line 1: it is not JSON"),
        ("[1]", "line 1: it is not a JSON object"),
        ('{"prompt_len": 1}', "gen_len must be an integer from 1 on, got None"),
        ('{"prompt_len": 0, "gen_len": 1}', "prompt_len must be an integer from 1 on, got 0"),
        ('{"prompt_len": true, "gen_len": 1}', "prompt_len must be an integer from 1 on, got True"),
        ('{"prompt_len": 1, "gen_len": 1.5}', "gen_len must be an integer from 1 on, got 1.5"),
        ('{"prompt_len": 1, "gen_len": 1, "arrival_step": -1}', "arrival_step must be an integer from 0 on"),
        ('{"prompt_len": 1, "gen_len": 1, "arrival": 1}', "unknown field 'arrival'"),
    ],
)
def test_bad_traces_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_trace(text.splitlines())


# The command line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--batch-sizes", "1,0"), "'0' is no integer from 1 on"),
        (("--batch-sizes", "1,,2"), "'' is no integer from 1 on"),
        (("--prompt-len", "x"), "'x' is no integer from 1 on"),
        (("--gen-len", "-3"), "'-3' is no integer from 1 on"),
        (("--repeat", "0"), "'0' is no integer from 1 on"),
        (("--depth", "-16"), "'-16' is no integer from 0 on"),
        (("--shared-prefix", "-1"), "'-1' is no integer from 0 on"),
        (("--depth", "8"), "depth 8 is no multiple of the block size 16"),
        (("--prompt-len", "8", "--shared-prefix", "9"), "shared_prefix must be between 0 and prompt_len 8, got 9"),
        (("--prompt-len", "500"), "more than max_model_len 512"),
        (("--batch-sizes", "2", "--trace-file", "x"), "not allowed with argument"),
        (("--trace-file", "missing.jsonl"), "missing.jsonl: No such file"),
        (("--trace-file", "missing.jsonl", "--plot", "x.png"), "--plot: a trace has no batch sizes"),
        (("--trace-file", "missing.jsonl", "--depth", "16"), "--depth: the requests of a trace"),
        (("-m", "missing.gguf"), "missing.gguf"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(bench: Bench, argv: tuple[str, ...], words: str) -> None:
    status, out, err = bench(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("rvllm: error: ") and err.count("\n") == 1 and words in err


def test_bad_line_is_named(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"prompt_len": 1, "gen_len": 1}\n\xff')
    assert f"{path}: " in bench("--trace-file", path)[2]
    path.write_text('{"prompt_len": 1, "gen_len": 1}\n{"gen_len": 1}')
    assert f"{path}: line 2: prompt_len" in bench("--trace-file", path)[2]


def test_plot(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    status, _, err = bench("-npl", "1,2", "-npp", "4", "-ntg", "2", "--plot", path)
    assert (status, err) == (0, "") and path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = bench("--plot", tmp_path / "out.png")
    assert (status, out) == (2, "") and "pip install 'rvllm[bench]'" in err
