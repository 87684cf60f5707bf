"""Lines of batch files, in the form of OpenAI's batch API. A line of input is read as a request, whose answer
becomes a line of output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from carousel.http_client import HttpAnswer
from runtime.base.random_ids import random_id

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    *("/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
)
"""Paths that lines may ask: those that answer with one JSON object and that any user of a server may ask."""
MAX_LINE_BYTES = 64 << 20
DUPLICATE = "duplicate_custom_id"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


_NULL = msgspec.Raw(b"null")


class _Request(msgspec.Struct):
    """Fields as they are written: what a stranger put in the place of a text may take much to decode."""

    custom_id: msgspec.Raw = _NULL
    method: msgspec.Raw = _NULL
    url: msgspec.Raw = _NULL
    body: msgspec.Raw = _NULL


class _Body(msgspec.Struct):
    stream: msgspec.Raw = _NULL


class _Error(msgspec.Struct, omit_defaults=True):
    code: str
    message: str
    line: int = 0
    """Number of the line of input, from 1; 0 for a line that was sent, which its custom_id names."""


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Output(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of input that can be sent."""

    number: int
    """Number of the line, from 1."""
    custom_id: str
    url: str
    body: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.body)


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line of input that cannot be sent, and why."""

    number: int
    custom_id: str | None
    """Its custom_id, if it has one."""
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class OutputLine:
    data: bytes
    """JSON and the line break."""
    is_good: bool
    """True if the server has answered with status 200."""


def read_lines(file: BinaryIO) -> Iterator[BatchRequest | RefusedLine]:
    """Yield the lines of a batch file. Blank ones are left out, but count in the numbers."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            while data and not data.endswith(b"\n"):
                data = file.readline(MAX_LINE_BYTES)
            message = f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
            yield RefusedLine(number, None, "line_too_long", message)
            continue
        if number == 1:
            data = data.removeprefix(BYTE_ORDER_MARK)
        if data.strip():
            yield read_line(number, data)


def read_line(number: int, data: bytes) -> BatchRequest | RefusedLine:
    """Return the request of a line, or its refusal."""
    try:
        data.decode()
        line = msgspec.json.decode(data, type=_Request)
        custom_id, method, url = map(_text, (line.custom_id, line.method, line.url))
    except UnicodeDecodeError as error:
        return RefusedLine(number, None, "invalid_json_line", f"not UTF-8: byte {error.start}")
    except RecursionError:
        return RefusedLine(number, None, "invalid_json_line", "nested too deep")
    except msgspec.DecodeError as error:
        return RefusedLine(number, None, "invalid_json_line", str(error))
    body = bytes(line.body)
    if not custom_id:
        message = "custom_id: each line needs one, a string by which its answer is found"
        return RefusedLine(number, None, "invalid_custom_id", message)
    if method != "POST":
        return RefusedLine(number, custom_id, "invalid_method", "method: must be POST")
    if url not in URLS:
        message = f"url: must be one of {', '.join(URLS)}"
        return RefusedLine(number, custom_id, "invalid_url", message)
    try:
        stream = msgspec.json.decode(body, type=_Body).stream
    except msgspec.DecodeError:
        return RefusedLine(number, custom_id, "invalid_body", "body: must be the JSON object to send")
    if bytes(stream) == b"true":
        message = "body.stream: must not be true: each answer is one line"
        return RefusedLine(number, custom_id, "invalid_body", message)
    return BatchRequest(number, custom_id, url, body)


def _text(field: msgspec.Raw) -> str | None:
    """Return a field that is a text; None for any other. Raises msgspec.DecodeError."""
    raw = bytes(field)
    return msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else None


def duplicate(line: BatchRequest | RefusedLine) -> RefusedLine:
    """Return the refusal of a line whose custom_id an earlier one has."""
    return RefusedLine(line.number, line.custom_id, DUPLICATE, "custom_id: an earlier line has the same")


def refused(line: RefusedLine) -> OutputLine:
    """Return the line of output for a line that is not sent."""
    return _encode(line.custom_id, None, _Error(line.code, line.message, line.number))


def failed(request: BatchRequest, code: str, message: str) -> OutputLine:
    """Return the line of output for a request without an answer."""
    return _encode(request.custom_id, None, _Error(code, message))


def answered(request: BatchRequest, answer: HttpAnswer) -> OutputLine:
    """Return the line of output for an answer, whatever its status. A body that is not JSON becomes a string,
    and fails the line if the status is 200.
    """
    error = None
    try:
        # On one line, whoever wrote it.
        body = msgspec.json.format(answer.body, indent=-1)
        body.decode()
    except (ValueError, RecursionError):  # msgspec's and UTF-8's errors are ValueErrors
        body = msgspec.json.encode(answer.body.decode(errors="replace"))
        if answer.status == 200:
            error = _Error("invalid_answer", "the answer is not JSON")
    request_id = answer.headers.get("x-request-id", "")
    return _encode(request.custom_id, _Response(answer.status, request_id, msgspec.Raw(body)), error)


def _encode(custom_id: str | None, response: _Response | None, error: _Error | None) -> OutputLine:
    output = _Output(f"batch_req_{random_id()}", custom_id, response, error)
    is_good = response is not None and response.status_code == 200 and error is None
    return OutputLine(msgspec.json.encode(output) + b"\n", is_good)


# -- reading an output again ---------------------------------------------------------------------------------


class _WrittenResponse(msgspec.Struct):
    status_code: int


class _Written(msgspec.Struct):
    custom_id: str | None
    response: _WrittenResponse | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class WrittenLine:
    """A line of an output: the line of input that it belongs to."""

    custom_id: str | None
    """Its custom_id; None if it belongs to a line by its number."""
    number: int | None
    """Number of the line of input, if that was not sent."""
    is_good: bool


def read_written(data: bytes) -> WrittenLine | None:
    """Return what a line of an output says; None if it is no such line."""
    try:
        line = msgspec.json.decode(data, type=_Written)
    except (ValueError, RecursionError):
        return None
    error = line.error or {}
    number = error.get("line")
    is_good = line.error is None and line.response is not None and line.response.status_code == 200
    # Only the line that had the custom_id first is done with it.
    custom_id = None if error.get("code") == DUPLICATE else line.custom_id
    return WrittenLine(custom_id, number if isinstance(number, int) else None, is_good)
