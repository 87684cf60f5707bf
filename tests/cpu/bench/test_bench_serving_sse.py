"""Events out of bytes, however the bytes were cut."""

from __future__ import annotations

import pytest

from bench_serving.sse import EventParser

STREAM = b': ping\n\ndata: {"a":1}\n\ndata:{"b":2}\r\n\r\nevent: x\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":2}', b"one\ntwo", b"[DONE]"]


def parse(*pieces: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def test_events_do_not_depend_on_where_the_bytes_are_cut() -> None:
    assert parse(STREAM) == EVENTS
    assert parse(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EVENTS
    for cut in range(len(STREAM)):
        assert parse(STREAM[:cut], STREAM[cut:]) == EVENTS


@pytest.mark.parametrize("lost", [1, 2])
def test_the_last_event_is_not_lost_without_its_blank_line(lost: int) -> None:
    assert parse(STREAM[:-lost]) == EVENTS


def test_an_event_is_out_as_soon_as_it_is_complete() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\nda") == [b"x"]
    assert parser.feed(b"ta: y\n\n") == [b"y"]
    assert parser.finish() == []


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_an_event_that_comes_by_itself_is_whole(line_end: bytes) -> None:
    parser = EventParser()
    for number in range(3):
        assert parser.feed(b"data: %d%b\n" % (number, line_end)) == [b"%d" % number]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("before", "event"), [(b"data: a\n", b"a\nb"), (b"event: x\n", b"b"), (b": ping", None)]
)
def test_what_came_before_belongs_to_the_event(before: bytes, event: bytes | None) -> None:
    parser = EventParser()
    assert parser.feed(before) == []
    assert parser.feed(b"data: b\n\n") == ([] if event is None else [event])
