"""Timelines in the detokenizer: of the sampled sequences that ended last, by label, without their text."""

from __future__ import annotations

from typing import Any

import msgspec

from detokenizer_proc.timelines import PAGE_SIZE, Timelines
from runtime.text.tokenizer import Tokenizer
from runtime.wire.handle import make_handle
from runtime.wire.messages import Closed, ControlReply, ControlRequest, Finish, StreamOpen, Usage
from runtime.wire.perf_metrics import Stamp, TraceStamps
from tests.harness.ring.detokenizer_ring import Ring

CONTEXT = bytes(range(1, 25)) + b"\x01"
TRACE = TraceStamps(CONTEXT, (Stamp("tokenizer_in", 10.0), Stamp("row", 10.5, 3)))


def finish(trace: TraceStamps | None = TRACE) -> Finish:
    return Finish("stop", Usage(5, 7, 3), trace=trace)


def test_times_are_those_since_the_first_and_on_the_wall() -> None:
    timelines = Timelines(lambda: 12.0, lambda: 5000.0)
    timelines.add("mine", make_handle(1, 2, 3, 4), finish())
    (timeline,) = timelines.of("mine")
    assert (timeline.index, timeline.attempt, timeline.trace_id) == (3, 4, CONTEXT[:16].hex())
    assert timeline.started_s == 4998.0
    assert timeline.stamps == [("tokenizer_in", 0.0, 0), ("row", 0.5, 3)]
    assert (timeline.prompt_tokens, timeline.cached_tokens, timeline.completion_tokens) == (5, 3, 7)
    assert timelines.of("other") == []


def test_the_last_ones_are_kept_and_those_that_are_not_sampled_are_not() -> None:
    timelines = Timelines(max_kept=2)
    for number in range(4):
        timelines.add(f"request {number}", make_handle(1, number), finish())
        timelines.add("plain", make_handle(1, number), finish(None))
    found = [label for number in range(4) if timelines.of(label := f"request {number}")]
    assert found == ["request 2", "request 3"]
    assert not timelines.of("plain")


def test_all_are_told_in_pages_and_none_twice() -> None:
    timelines = Timelines(max_kept=PAGE_SIZE + 5)
    for number in range(PAGE_SIZE + 20):
        timelines.add("any", make_handle(1, number), finish())
    first = timelines.after(0)
    assert [each.number for each in first] == list(range(16, PAGE_SIZE + 16))
    rest = timelines.after(first[-1].number)
    assert [each.number for each in rest] == list(range(PAGE_SIZE + 16, PAGE_SIZE + 21))
    assert timelines.after(rest[-1].number) == timelines.after(10_000) == []
    assert first[0].clock_s == 10.0


def ask(ring: Ring, label: str) -> Any:
    ring.inbox.send(ControlRequest(ring.client, 9, "timeline", label=label))
    ring.loop.turn(ring.now)
    (reply,) = [each for each in ring.received() if isinstance(each, ControlReply)]
    assert (reply.number, reply.ok) == (9, True)
    return msgspec.msgpack.decode(reply.body)


def test_a_question_is_answered_by_the_detokenizer(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.now = 11.0
    handle = ring.handle()
    ring.step((handle, 70), opened=(StreamOpen(handle, 5, label="mine"),))
    ring.step(closed=(Closed(handle, "length", trace=TRACE),))
    (terminal,) = [each.finish for each in ring.outputs if each.finish is not None]
    assert terminal.trace is not None
    assert terminal.trace.stamps == (*TRACE.stamps, Stamp("detokenizer", 11.0))
    (timeline,) = ask(ring, "mine")
    assert [stamp[0] for stamp in timeline["stamps"]] == ["tokenizer_in", "row", "detokenizer"]
    assert timeline["stamps"][-1][1] == 1.0
    assert timeline["reason"] == "length"
    assert ask(ring, "other") == []


def test_a_question_of_who_has_gone_is_dropped(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.inbox.send(ControlRequest(12345, 9, "timeline", label="mine"))
    ring.loop.turn(ring.now)
    assert ring.received() == []
