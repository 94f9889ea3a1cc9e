"""Memory and processors within the limits of control groups, of either version."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rvllm import system

MiB = 1 << 20


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(system, "_cgroup_directories", lambda controller: [tmp_path])
    monkeypatch.setattr(system.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * MiB))
    return tmp_path


def write(group: Path, **files: object) -> None:
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(f"{text}\n")


def test_page_cache_is_not_used_memory(group: Path) -> None:
    write(group, memory__max=500 * MiB, memory__current=450 * MiB)
    assert system.available_memory() == 50 * MiB
    stat = f"anon {40 * MiB}\nfile {410 * MiB}\ninactive_file {300 * MiB}\nactive_file {100 * MiB}\ninactive_anon 7"
    write(group, memory__stat=stat)
    assert system.available_memory() == 450 * MiB


def test_page_cache_of_version_1_includes_the_groups_below(group: Path) -> None:
    write(group, memory__limit_in_bytes=500 * MiB, memory__usage_in_bytes=450 * MiB)
    stat = f"inactive_file 1\nactive_file 2\ntotal_inactive_file {200 * MiB}\ntotal_active_file {50 * MiB}"
    write(group, memory__stat=stat)
    assert system.available_memory() == 300 * MiB


def test_a_group_without_a_limit_leaves_the_machines_memory(group: Path) -> None:
    write(group, memory__max="max", memory__current=450 * MiB)
    assert system.available_memory() == 1000 * MiB


@pytest.mark.parametrize(("quota", "cpus"), [("100000 100000", 1), ("50000 100000", 1)])
def test_cpu_quota(group: Path, quota: str, cpus: int) -> None:
    unlimited = system.available_cpus()
    write(group, cpu__max=quota)
    assert system.available_cpus() == cpus
    write(group, cpu__max="max 100000")
    assert system.available_cpus() == unlimited
