"""Errors that are the user's to mend: reported as one line, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """The message is one line."""


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
