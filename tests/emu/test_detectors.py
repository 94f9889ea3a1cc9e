"""The emulator finds the mistakes it is there for: each of seeded_bugs.cu is caught, no repaired twin is."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import build_emulated
import pytest

pytest.importorskip("pybind11", reason="the emulator's tests need rvllm[dev] and a C++ compiler")
SOURCE = Path(__file__).with_name("seeded_bugs.cu")
SCHEDULES = ["0", "1", "2", "3"]

# Name of the bug -> what a plain run prints for it. With "wrong" only the results tell.
REPORTED = {
    "divergent_barrier": "divergent barrier",
    "barrier_against_shuffle": "deadlock",
    "exit_before_shuffle": "deadlock",
    "lane_outside_its_mask": "leaves it out",
    "reads_absent_lane": "reads lane",
    "too_much_static_shared": "65536 bytes of shared memory",
    "too_many_threads": "1025 x 1 x 1 threads",
    "empty_grid": "0 x 1 x 1 blocks",
    "grid_too_high": "1 x 70000 x 1 blocks",
    "too_much_dynamic_shared": "50000 bytes of dynamic shared memory",
    "wrong_copy_kind": "a copy to where its kind or length does not allow",
    "copy_too_long": "a copy from where its kind or length does not allow",
    "synchronization_in_capture": "cudaStreamSynchronize while a stream is captured",
    "sum_without_syncthreads": "wrong",
    "uninitialised_shared": "wrong",
}
LAZY = [
    "missing_synchronization",
    "pinned_buffer_used_again",
    "streams_without_event",
    "default_stream_unwaited",
]
TSAN = [
    "sum_without_syncthreads",
    "exchange_without_syncwarp",
    "blocks_race",
    "blocks_race_across_barriers",
]
ASAN = {
    "overread": "heap-buffer-overflow",
    "shared_overflow": "index 128 out of bounds",
    "misaligned_float4": "misaligned address",
    "integer_overflow": "signed integer overflow",
}
ALL = sorted({*REPORTED, *LAZY, *ASAN, *TSAN, "host_dereference"})


@cache
def program(variant: str) -> Path:
    return build_emulated.build_program(variant, SOURCE, build_emulated.build_directory(variant))


def run(variant: str, name: str, which: str, **settings: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    env.update({f"RVLLM_EMU_{key.upper()}": value for key, value in settings.items()})
    env["ASAN_OPTIONS"] = "detect_stack_use_after_return=0:detect_leaks=0"
    return subprocess.run(
        [program(variant), name, which], env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("order", SCHEDULES)
@pytest.mark.parametrize("name", REPORTED)
def test_a_bug_is_reported(name: str, order: str) -> None:
    output = run("plain", name, "bug", order=order).stdout
    assert REPORTED[name] in output
    assert "right" not in output


def test_a_report_names_kernel_block_thread_and_lines() -> None:
    output = run("plain", "divergent_barrier", "bug").stdout
    assert "seeded_bugs.cu:" in output
    assert "block(0,0,0) thread(64,0,0): divergent barrier: waits at line " in output


@pytest.mark.parametrize("name", LAZY)
def test_lazy_streams_show_a_missing_wait(name: str) -> None:
    assert run("plain", name, "bug", lazy="1").stdout == "wrong\n"


def test_guarded_device_memory_faults_on_the_host() -> None:
    assert run("plain", "host_dereference", "bug", guard="1").returncode < 0


@pytest.mark.parametrize("name", TSAN)
def test_thread_sanitizer_finds_a_race(name: str) -> None:
    result = run("tsan", name, "bug")
    assert "WARNING: ThreadSanitizer: data race" in result.stderr
    assert "seeded_bugs.cu:" in result.stderr


@pytest.mark.parametrize("name", ASAN)
def test_address_and_undefined_behaviour_sanitizers(name: str) -> None:
    result = run("asan", name, "bug")
    assert result.returncode != 0
    assert ASAN[name] in result.stderr
    assert "seeded_bugs.cu:" in result.stderr


@pytest.mark.parametrize("variant", ["plain", "asan", "tsan"])
@pytest.mark.parametrize("name", ALL)
def test_a_repaired_program_is_right_and_without_report(name: str, variant: str) -> None:
    result = run(variant, name, "fixed", lazy="1", guard="1" if variant == "plain" else "0", order="2")
    assert (result.returncode, result.stdout, result.stderr) == (0, "right\n", "")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("none", "the NVIDIA driver finds no CUDA device"),
        ("no_driver", "no NVIDIA driver is installed"),
        (
            "old_driver",
            "the driver is for CUDA 12.4, and rvllm was built with CUDA 13.0: install a newer one",
        ),
    ],
)
def test_a_machine_without_a_device_says_so(device: str, message: str) -> None:
    assert message in run("plain", "no_device", "bug", device=device).stdout


def test_too_little_memory_says_how_much_there_is() -> None:
    output = run("plain", "out_of_memory", "bug", memory="2").stdout
    assert (
        output
        == "error: [cuda] too little device memory for ones: 4.0 MiB asked for, 2.0 MiB of 2.0 MiB free\n"
    )


@pytest.mark.parametrize(
    ("name", "compiler", "runner"),
    [
        ("ucontext", "g++ -DRV_EMU_UCONTEXT", []),
        ("aarch64", "aarch64-linux-gnu-g++ -static", ["qemu-aarch64"]),
    ],
)
def test_other_ways_to_switch_fibers(
    name: str, compiler: str, runner: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in (compiler.split()[0], *runner):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool}")
    directory = build_emulated.build_directory(name)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("RVLLM_EMU_BUILD", str(directory))
    path = build_emulated.build_program("plain", SOURCE, directory)
    for bug, report in REPORTED.items():
        for which, expected in (("bug", report), ("fixed", "right")):
            output = subprocess.run(
                [*runner, path, bug, which], capture_output=True, text=True, timeout=60
            ).stdout
            assert expected in output, (bug, which)
