"""Lines of batch files: what is sent, what is refused and why, and what comes out."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest

from carousel.batch import lines as batch_lines
from carousel.batch.id_set import FIRST_SLOTS, IdSet
from carousel.batch.lines import (
    URLS,
    BatchRequest,
    RefusedLine,
    answered,
    duplicate,
    failed,
    read_line,
    read_lines,
    read_written,
    refused,
)
from carousel.http_client import HttpAnswer
from tests.harness.cases import for_each

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
REQUEST = BatchRequest(1, "a", "/v1/completions", b"{}")


def written(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode() + b"\n"


@pytest.mark.parametrize("field", ["custom_id", "method", "url", "stream"])
def test_a_field_that_is_no_text_is_not_decoded(field: str) -> None:
    """A line of 64 MiB took 1.5 GB."""
    lists: list[list[int]] = [[]] * 300_000
    line = written(body={"stream": lists}) if field == "stream" else written(**{field: lists})
    tracemalloc.start()
    try:
        read_line(1, line)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(line)
    finally:
        tracemalloc.stop()


@for_each("url", URLS)
def test_a_line_is_sent_as_its_body_is_written(url: str) -> None:
    line = read_line(
        7, b'{"custom_id":"a","method":"POST","url":"%b","body":{"a" : 1e2, "a":2}}' % url.encode()
    )
    assert line == BatchRequest(7, "a", url, b'{"a" : 1e2, "a":2}')


@for_each(
    ("data", "custom_id", "code", "says"),
    [
        (b"{", None, "invalid_json_line", "malformed|truncated"),
        (b"[1]", None, "invalid_json_line", "object"),
        (b'{"custom_id": "\xff"}', None, "invalid_json_line", "UTF-8"),
        (b'{"custom_id": "\\ud800"}', None, "invalid_json_line", "truncated"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, None, "invalid_json_line", "nested"),
        (written(custom_id=None), None, "invalid_custom_id", "custom_id"),
        (written(custom_id=""), None, "invalid_custom_id", "custom_id"),
        (written(custom_id=3), None, "invalid_custom_id", "custom_id"),
        (written(method="GET"), "a", "invalid_method", "POST"),
        (written(url="/flush_cache"), "a", "invalid_url", "/v1/embeddings"),
        (written(url="/v1/completions HTTP/1.1\r\nX: y"), "a", "invalid_url", "must be one of"),
        (written(url=["/v1/completions"]), "a", "invalid_url", "must be one of"),
        (written(body=[]), "a", "invalid_body", "object"),
        (b'{"custom_id": "a", "method": "POST", "url": "/score"}', "a", "invalid_body", "object"),
        (written(body={"stream": True}), "a", "invalid_body", "body.stream"),
    ],
)
def test_a_line_that_cannot_be_sent_says_why(
    data: bytes, custom_id: str | None, code: str, says: str
) -> None:
    line = read_line(3, data)
    assert isinstance(line, RefusedLine)
    assert (line.number, line.custom_id, line.code) == (3, custom_id, code)
    assert any(each in line.message for each in says.split("|")), line.message
    output = json.loads(refused(line).data)
    assert output["response"] is None
    assert output["error"] == {"code": code, "message": line.message, "line": 3}


def test_blank_lines_count_and_a_long_one_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 200)
    file = io.BytesIO(
        b"\xef\xbb\xbf" + written() + b"\n \r\n" + written(body={"prompt": 1000 * "x"}) + written()[:-1]
    )
    good, long, last = read_lines(file)
    assert isinstance(good, BatchRequest)
    assert isinstance(long, RefusedLine)
    assert isinstance(last, BatchRequest)
    assert (good.number, long.number, last.number) == (1, 4, 5)
    assert (long.custom_id, long.code) == (None, "line_too_long")


def test_answers_are_lines_of_openais_form() -> None:
    answer = HttpAnswer(200, {"x-request-id": "r"}, b'{\n "text": "a\\nb",\n "n": 1e2}')
    line = answered(REQUEST, answer)
    assert line.is_good
    assert line.data.endswith(b"}\n")
    assert line.data.count(b"\n") == 1
    output = json.loads(line.data)
    assert output.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "r", "body": {"text": "a\nb", "n": 100}}
    assert output == {"custom_id": "a", "response": response, "error": None}


@for_each("body", [b"<html>\n", b"\xff", b"", b'{"a": "\xff"}', b"[" * 10_000])
@for_each("status", [200, 400])
def test_an_answer_that_is_not_json_is_text(status: int, body: bytes) -> None:
    line = answered(REQUEST, HttpAnswer(status, {}, body))
    assert not line.is_good
    output = json.loads(line.data)
    assert output["response"]["status_code"] == status
    assert output["response"]["body"] == body.decode(errors="replace")
    assert (output["error"] or {}).get("code") == ("invalid_answer" if status == 200 else None)


def test_what_is_written_is_known_again() -> None:
    def again(data: bytes) -> tuple[str | None, int | None, bool]:
        line = read_written(data)
        assert line is not None
        return line.custom_id, line.number, line.is_good

    bad = RefusedLine(4, "a", "invalid_url", "url")
    assert again(answered(REQUEST, HttpAnswer(200, {}, b"{}")).data) == ("a", None, True)
    assert again(answered(REQUEST, HttpAnswer(404, {}, b"{}")).data) == ("a", None, False)
    assert again(failed(REQUEST, "request_timeout", "late").data) == ("a", None, False)
    assert again(refused(bad).data) == ("a", 4, False)
    # Another line is the one with that custom_id, and may still lack its answer.
    assert again(refused(duplicate(bad)).data) == (None, 4, False)
    assert read_written(b'{"id":"batch_req_1","custom_id":"a","resp') is None
    assert read_written(b"\0\0\n") is None


def test_a_set_of_ids_grows_and_tells_texts_from_numbers() -> None:
    ids = IdSet()
    names = [f"request-{number}" for number in range(2 * FIRST_SLOTS)]
    assert all(ids.add(name) for name in names)
    assert not any(ids.add(name) for name in names)
    assert len(ids) == len(names)
    assert names[-1] in ids
    assert "another" not in ids
    assert ids.add("7")
    assert 7 not in ids
