"""Request and result files in OpenAI's batch format, read and appended line by line, of any size.

    requests   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    results    {"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {...}},
                "error": null}

Results are in order of completion; custom_id maps them to requests. An invalid line gets a result with an `error`
and its line number, and no `response`. https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from twostroke.api.protocol.shapes import CHECKED_BYTES
from twostroke.errors import InvalidParameter, shown

MAX_LINE_BYTES = 64 * 2**20
"""Bytes of one request: far beyond any context, and small enough to hold many at a time."""
MAX_ID_CHARS = 512
_MAX_SMALL = 12 * MAX_ID_CHARS + 2
"""Bytes of the JSON of an id: at most two escapes for each character, in quotes."""

_BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Line with a valid request."""

    line: int
    """Line number, from 1."""
    custom_id: str
    url: str
    body: dict[str, Any] | bytes
    """Parsed object; for a large line its JSON, which is parsed after its shape was checked."""


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """Line that is not a request, or repeats an earlier custom_id."""

    line: int
    custom_id: str | None
    code: str
    message: str


def read_requests(path: Path, urls: frozenset[str]) -> Iterator[BatchRequest | InvalidLine]:
    """Yield the requests and invalid lines of a file one at a time; empty lines are skipped.

    Args:
        path: path of the file.
        urls: urls that requests may have.

    Raises:
        InvalidParameter: the file cannot be read.
    """
    seen: set[bytes] = set()
    for number, content in _lines(path):
        if content is None:
            yield InvalidLine(number, None, "line_too_long", f"the line has more than {MAX_LINE_BYTES:,} bytes.")
            continue
        found = _request(number, content, urls)
        if found is None:
            continue
        if found.custom_id is not None:
            name = digest(found.custom_id)
            if name in seen:
                told = f"the custom_id {found.custom_id!r} was used in an earlier line; it must be unique."
                found = InvalidLine(number, found.custom_id, "duplicate_custom_id", told)
            seen.add(name)
        yield found


def count_lines(path: Path) -> int:
    """Return the number of lines, for a progress bar. It runs at the speed of the disk.

    Raises:
        InvalidParameter: the file cannot be read.
    """
    with _opened(path) as file:
        count, last = 0, b"\n"
        while block := file.read(_BLOCK_BYTES):
            count += block.count(b"\n")
            last = block[-1:]
        return count + (last != b"\n")


def digest(custom_id: str) -> bytes:
    """Return 16 bytes that identify a custom_id of any length."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ResultsFile:
    """Result file: results are appended as they complete, and results of an earlier run are read back.

    A last line that is incomplete, because the earlier run was killed, is removed, and its request is run again.

    Raises:
        InvalidParameter: the file cannot be written, is locked by another process, or is not a result file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: IO[bytes] = path.open("a+b")
        except OSError as error:
            raise InvalidParameter("output", str(path), f"cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._done, self._bad_lines = self._read()
        except BlockingIOError as error:
            self._file.close()
            raise InvalidParameter(
                "output", str(path), "is being written by another run", "Wait until it ends."
            ) from error
        except BaseException:
            self._file.close()
            raise

    def has(self, found: BatchRequest | InvalidLine) -> bool:
        """Return whether there is already a result for this line."""
        if isinstance(found, InvalidLine):
            return found.line in self._bad_lines
        return digest(found.custom_id) in self._done

    def add_response(self, request: BatchRequest, status: int, body: Mapping[str, Any]) -> None:
        """Append the response to a request, whatever its status."""
        name = uuid.uuid4().hex
        self._append(name, request.custom_id, {"status_code": status, "request_id": f"req_{name}", "body": body}, None)

    def add_error(self, found: InvalidLine) -> None:
        """Append the error of an invalid line."""
        error = {"code": found.code, "message": found.message, "param": None, "line": found.line}
        self._append(uuid.uuid4().hex, found.custom_id, None, error)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _append(self, name: str, custom_id: str | None, response: Any, error: Any) -> None:
        whole = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
        try:
            content = msgspec.json.encode(whole)
        except UnicodeEncodeError:  # the message quotes a lone surrogate
            content = json.dumps(whole, ensure_ascii=False).encode("utf-8", "replace")
        # one write and a flush, so that a killed process leaves whole lines
        self._file.write(content + b"\n")
        self._file.flush()

    def _read(self) -> tuple[set[bytes], set[int]]:
        """Return the digests of ids, and the line numbers, that have results."""
        done: set[bytes] = set()
        bad_lines: set[int] = set()
        self._file.seek(0)
        end = 0
        for number, content in enumerate(self._file, start=1):
            whole = content.endswith(b"\n")
            try:
                result = msgspec.json.decode(content, type=_Result)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                if not whole:
                    break
                limit = f"has a line that is not a batch result: line {number} ({error})"
                raise InvalidParameter("output", str(self._path), limit, "Give another file.") from error
            if result.error is not None and result.error.line is not None:
                bad_lines.add(result.error.line)
            elif result.custom_id is not None:
                done.add(digest(result.custom_id))
            end += len(content)
            if not whole:
                self._file.write(b"\n")
                end += 1
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)
        return done, bad_lines


class _LargeRow(msgspec.Struct):
    """Fields of a large line, left as JSON; missing ones are null."""

    custom_id: msgspec.Raw = msgspec.Raw(b"null")
    method: msgspec.Raw = msgspec.Raw(b"null")
    url: msgspec.Raw = msgspec.Raw(b"null")
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    line: int | None = None


class _Result(msgspec.Struct):
    id: str
    custom_id: str | None
    error: _Error | None = None


def _request(number: int, content: bytes, urls: frozenset[str]) -> BatchRequest | InvalidLine | None:
    """Return the request or error of a line; None if it is empty."""
    if not content.strip():
        return None
    try:
        fields = _fields(content)
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        return InvalidLine(number, None, "invalid_json_line", f"the line is not valid JSON ({error}).")
    if fields is None:
        return InvalidLine(number, None, "invalid_json_line", "the line is not a JSON object.")
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        told = f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters."
        return InvalidLine(number, None, "missing_required_parameter", told)
    if any(0xD800 <= ord(char) < 0xE000 for char in custom_id):
        told = "custom_id has a lone surrogate, which cannot be written to the results."
        return InvalidLine(number, None, "invalid_request", told)
    problem = ""
    if fields.get("method") != "POST":
        problem = f"method must be POST; it is {shown(fields.get('method'))}."
    elif not isinstance(url, str) or url not in urls:
        problem = f"url must be one of {', '.join(sorted(urls))}; it is {shown(url)}."
    elif not isinstance(body, (dict, bytes)):
        problem = f"body must be an object; it is {shown(body)}."
    if problem:
        return InvalidLine(number, custom_id, "invalid_request", problem)
    return BatchRequest(number, custom_id, cast(str, url), cast("dict[str, Any] | bytes", body))


def _fields(content: bytes) -> dict[str, Any] | None:
    """Return the fields of a line; None if it is not an object. The body of a large line is returned as JSON bytes.

    Raises:
        ValueError: the line is not JSON (from either parser).
    """
    if len(content) <= CHECKED_BYTES:
        value = json.loads(content)
        return cast(dict[str, Any], value) if isinstance(value, dict) else None
    try:
        row = msgspec.json.decode(content, type=_LargeRow)
    except msgspec.ValidationError:
        return None
    fields: dict[str, Any] = {name: _small_value(getattr(row, name)) for name in ("custom_id", "method", "url")}
    body = bytes(row.body)
    return fields | {"body": body if body.startswith(b"{") else _small_value(row.body)}


def _small_value(written: msgspec.Raw) -> Any:
    """Return a field's value; if it is longer than any valid value, the beginning of its JSON."""
    content = bytes(written)
    return json.loads(content) if len(content) <= _MAX_SMALL else content[:_MAX_SMALL].decode("utf-8", "replace")


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and bytes of each line; None for a line that is too long."""
    number = 0
    with _opened(path) as file:
        while content := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(content) <= MAX_LINE_BYTES:
                yield number, content
                continue
            while content and not content.endswith(b"\n"):
                content = file.readline(_BLOCK_BYTES)
            yield number, None


@contextlib.contextmanager
def _opened(path: Path) -> Generator[IO[bytes]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidParameter("requests", str(path), f"cannot be read ({error.strerror})") from error
    with file:
        yield file
