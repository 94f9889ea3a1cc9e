"""Files in OpenAI's batch format: requests go in, a line each, and answers come out, a line each, in any order."""

from __future__ import annotations

import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from rvllm.server.errors import from_validation_error

BOM_UTF8 = b"\xef\xbb\xbf"
ID_PREFIX = "batch_req_"
_HEAD = b'{"id":"' + ID_PREFIX.encode()  # how every line of an output begins


class BatchRequest(BaseModel):
    """One line of an input."""

    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    body: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line of an input that is no request. custom_id: None where it has none."""

    number: int
    custom_id: str | None
    code: str
    reason: str

    def entry(self) -> dict[str, Any]:
        """The line of the output that says so."""
        message = f"line {self.number}: {self.reason}"
        error = {"code": self.code, "message": message, "line": self.number}
        return output_entry(self.custom_id, error=error)


def output_entry(
    custom_id: str | None, response: dict[str, Any] | None = None, error: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A line of an output; response: {"status_code", "request_id", "body"}."""
    identifier = ID_PREFIX + uuid.uuid4().hex
    return {"id": identifier, "custom_id": custom_id, "response": response, "error": error}


def is_failure(entry: dict[str, Any]) -> bool:
    return entry["response"] is None or entry["response"]["status_code"] != 200


def parse_line(number: int, line: bytes) -> BatchRequest | BadLine:
    try:
        fields = from_json(line, allow_inf_nan=True)  # the body is the API's to refuse
    except ValueError as error:
        return BadLine(number, None, "invalid_json", f"no valid JSON: {error}")
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    custom_id = custom_id if isinstance(custom_id, str) else None
    try:
        request = BatchRequest.model_validate(fields)
    except ValidationError as error:
        return BadLine(number, custom_id, "invalid_request", from_validation_error(error, fields).message)
    if request.body.get("stream"):
        return BadLine(number, custom_id, "invalid_request", "body.stream: a batch has no streams")
    return request


@dataclass
class InputFile:
    """Where the requests of a file are. A custom_id belongs to the first line that has it.

    lines: number and offset of the line of each custom_id. bad_lines: all others that are not blank.
    """

    path: Path
    lines: dict[str, tuple[int, int]] = field(default_factory=dict)
    bad_lines: list[BadLine] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> InputFile:
        """Raises OSError, and ValueError for a pipe."""
        found = cls(path)
        offset = 0
        with path.open("rb") as file:
            if not file.seekable():
                raise ValueError(f"{path}: must be a file, which is read twice")
            for number, line in enumerate(file, 1):
                start, offset = offset, offset + len(line)
                if number == 1 and line.startswith(BOM_UTF8):
                    line, start = line[len(BOM_UTF8) :], len(BOM_UTF8)
                if line.strip():
                    found._add(number, start, parse_line(number, line))
        return found

    def _add(self, number: int, offset: int, parsed: BatchRequest | BadLine) -> None:
        if isinstance(parsed, BadLine):
            self.bad_lines.append(parsed)
        elif parsed.custom_id in self.lines:
            reason = (
                f"custom_id {parsed.custom_id!r} is that of line {self.lines[parsed.custom_id][0]} already"
            )
            self.bad_lines.append(BadLine(number, parsed.custom_id, "duplicate_custom_id", reason))
        else:
            self.lines[parsed.custom_id] = number, offset

    def requests(self, without: set[str]) -> Iterator[BatchRequest]:
        """The requests in their order, but those of some custom_ids; read again, so that memory holds few of them.

        Raises ValueError where the file is not what it was.
        """
        for custom_id, (number, offset) in self.lines.items():
            if custom_id not in without:
                request = parse_line(number, self._line_at(offset))
                if isinstance(request, BadLine) or request.custom_id != custom_id:
                    raise ValueError(f"{self.path}: line {number} has changed while the batch ran")
                yield request

    def _line_at(self, offset: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return file.readline()
        except OSError as error:
            raise ValueError(f"{self.path}: {error.strerror or error}") from None


class OutputFile:
    """The answers so far, in a file that this process alone appends to, whole lines only.

    answered: custom_ids that need no answer any more. refused: numbers of the bad lines that have been told of.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file or makes it, and cuts off a last line that a killed run has left unfinished.

        Raises ValueError for what is no output of a batch, or is being written by another process, and OSError.
        """
        self.path = path
        self.answered: set[str] = set()
        self.refused: set[int] = set()
        self.num_failed = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._size = self._resume()
        except BaseException:
            os.close(self._file)
            raise

    def _resume(self) -> int:
        """Bytes of the whole lines."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise ValueError(f"{self.path}: must be a file, from which a batch can be resumed")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path}: another process writes it") from None
        size = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not (line.startswith(_HEAD) or _HEAD.startswith(line)):
                        raise ValueError(f"{self.path}: line {number} is no line of a batch's output")
                    break
                self._count(number, line)
                size += len(line)
        os.ftruncate(self._file, size)
        return size

    def _count(self, number: int, line: bytes) -> None:
        try:
            entry = from_json(line)
            custom_id, error = entry["custom_id"], entry["error"]
            is_known = line.startswith(_HEAD) and (custom_id is None or isinstance(custom_id, str))
            failed = is_failure(entry)
            refused_line = None if error is None else int(error["line"])
        except (ValueError, TypeError, KeyError):
            is_known = False
        if not is_known:
            raise ValueError(f"{self.path}: line {number} is no line of a batch's output")
        self._note(custom_id, refused_line, failed)

    def _note(self, custom_id: str | None, refused_line: int | None, failed: bool) -> None:
        self.num_failed += failed
        if refused_line is not None:
            self.refused.add(refused_line)
        elif custom_id is not None:
            self.answered.add(custom_id)

    def write(self, entry: dict[str, Any]) -> None:
        """Appends an entry. Raises OSError, and leaves no part of the line then."""
        line = to_json(entry, inf_nan_mode="null") + b"\n"
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        error = entry["error"]
        self._note(entry["custom_id"], None if error is None else error["line"], is_failure(entry))

    def sync(self) -> None:
        """Brings what has been written to the disk. Raises OSError."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)
