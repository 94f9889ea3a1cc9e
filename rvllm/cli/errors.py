"""Errors that are the user's to mend: reported as one line, without a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2


class CommandError(Exception):
    """The message is one line. status: what the command ends with."""

    def __init__(self, message: str, status: int = EXIT_USER_ERROR) -> None:
        super().__init__(message)
        self.status = status


def one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def user_errors() -> Iterator[None]:
    """Around code that checks or loads what the user named: its errors become CommandErrors."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ImportError, ValueError, OSError, RuntimeError, MemoryError) as error:
        raise CommandError(one_line(error)) from error


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around code that writes a file: a full disk is a failure on the way, one that cannot be opened a mistake."""
    try:
        yield
    except OSError as error:
        # Opening names its file; a pipe that breaks is standard output's.
        if error.filename is not None or isinstance(error, BrokenPipeError):
            raise
        raise CommandError(f"cannot write {os.fspath(path)}: {one_line(error)}", EXIT_FAILURE) from error


def is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or a null character within
        return False
