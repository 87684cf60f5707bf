"""Output: what goes to which detokenizer, in which order, and how much may wait for one that is stuck."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import (
    AbortRequest,
    Closed,
    ControlReply,
    ControlRequest,
    TensorBatch,
    TensorEntry,
    TokenBatch,
    TokenLogprobs,
)
from runtime.wire.transport import Framed
from scheduler_proc.core import output as output_module
from scheduler_proc.core.output import DetokenizerOutput, make_output
from scheduler_proc.loop import SchedulerLoop
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.fakes import RecordingOutbox
from tests.harness.simulation.sim_traffic import stream_open

A, B, C = (make_handle(client, 7) for client in (4, 5, 9))
"""With three detokenizers: of number 1, 2 and 0."""


def handles_in(batch: TokenBatch) -> list[bytes]:
    return [batch.handles[i : i + 16] for i in range(0, len(batch.handles), 16)]


def void(handles: list[bytes]) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(handles), "V16").copy()


def test_each_sequence_has_one_detokenizer_for_all_that_is_said_of_it() -> None:
    outboxes = [RecordingOutbox() for _ in range(3)]
    output = make_output(outboxes)
    for handle in (A, B, C):
        output.open(handle, stream_open(handle, 3))
    assert output.flush()
    opened = [outbox.take() for outbox in outboxes]
    assert [len(batch.opened) for (batch,) in opened] == [1, 1, 1]
    output.add_each(void([A, B, C, A]), np.array([1, 2, 3, 4], np.int32))
    output.add(B, [5, 6])
    for handle in (A, B, C):
        output.add_logprobs(TokenLogprobs(handle, b"1234"))
        output.add_prompt_logprobs(TokenLogprobs(handle, b"5678"))
        output.add_tensor(TensorEntry(handle, "context_logits", "float32", (1, 1), 0), handle[:4])
        output.close(Closed(handle, "stop"))
    output.reply(ControlReply(5, 1, opened[0][0].opened[0]))
    assert output.flush()
    for number, handle, tokens in ((1, A, [1, 4]), (2, B, [2, 5, 6]), (0, C, [3])):
        tensors, batch, *replies = outboxes[number].take()
        assert handles_in(batch) == [handle] * len(tokens)
        assert unpack_ids(batch.tokens).tolist() == tokens
        said = (*batch.logprobs, *batch.prompt_logprobs, *batch.closed, *tensors.message.entries)
        assert [each.handle for each in said] == [handle] * 4
        assert tensors.frames == (handle[:4],)
        assert [reply.client for reply in replies] == ([5] if handle == B else [])


def test_a_detokenizer_without_tokens_gets_no_message() -> None:
    outboxes = [RecordingOutbox() for _ in range(2)]
    output = make_output(outboxes)
    output.add_each(void([A, A]), np.array([1, 2], np.int32))
    assert output.flush()
    assert [len(outbox.messages) for outbox in outboxes] == [1, 0]


def test_one_detokenizer_without_room_blocks_and_the_others_still_read() -> None:
    outboxes = [RecordingOutbox(), RecordingOutbox(lambda: is_refusing)]
    is_refusing = True
    output = make_output(outboxes)
    for handle in (A, B):
        output.add(handle, [1])
    assert not output.flush()
    assert output.is_blocked
    output.add(A, [2])
    output.add(B, [3])
    assert not output.flush()
    assert [len(outbox.messages) for outbox in outboxes] == [2, 0]
    is_refusing = False
    assert output.flush()
    assert not output.is_blocked
    assert [unpack_ids(batch.tokens).tolist() for batch in outboxes[1].take()] == [[1], [3]]


def test_one_detokenizer_is_reached_without_routing() -> None:
    assert isinstance(make_output([RecordingOutbox()]), DetokenizerOutput)


@pytest.mark.parametrize("num_detokenizers", [1, 2, 3])
def test_sequences_of_many_clients_come_out_the_same_with_any_number_of_detokenizers(
    num_detokenizers: int,
) -> None:
    with running(num_detokenizers=num_detokenizers, max_rows=6) as system:
        requests = [message(i, [i + 1] * 6, max_tokens=9, client=i + 1) for i in range(6)]
        run_until_idle(system, *requests)
        with running(max_rows=6) as single:
            run_until_idle(single, *requests)
            assert system.detokenizer.tokens == single.detokenizer.tokens
        system.check_empty()


# -- raw logits --------------------------------------------------------------------------------------------


def test_raw_logits_go_out_untouched_and_before_what_may_end_their_sequence() -> None:
    outbox = RecordingOutbox()
    output = make_output([outbox])
    frame = memoryview(b"12345678")
    output.add(A, [1])
    output.close(Closed(A, "length"))
    output.add_tensor(TensorEntry(A, "generation_logits", "float32", (1, 2), 0), frame)
    assert output.flush()
    tensors, batch = outbox.messages
    assert isinstance(tensors, Framed)
    assert tensors.frames[0] is frame
    assert batch.closed


def test_many_raw_frames_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "MAX_TENSORS", 3)
    outbox = RecordingOutbox()
    output = make_output([outbox])
    for i in range(7):
        output.add_tensor(TensorEntry(A, "context_logits", "float32", (1, 1), i), bytes([i] * 4))
    assert output.flush()
    batches = [framed.message for framed in outbox.messages]
    assert all(isinstance(batch, TensorBatch) for batch in batches)
    assert [len(batch.entries) for batch in batches] == [3, 3, 1]
    assert [frame[0] for framed in outbox.messages for frame in framed.frames] == list(range(7))


# -- a detokenizer that does not read ----------------------------------------------------------------------


def test_what_a_client_can_pile_up_behind_a_stuck_detokenizer_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_module, "MAX_BACKLOG", 40)
    monkeypatch.setattr("scheduler_proc.loop.MAX_MESSAGES_PER_STEP", 8)
    with running(max_live=10) as system:
        loop = SchedulerLoop(system.scheduler)
        system.outbox.refuses = lambda: True
        requests = [message(i, [1, 2, 3]) for i in range(300)]
        for number, request in enumerate(requests):
            assert system.inbox.send(request)
            assert system.inbox.send(AbortRequest((request.handle,)))
            assert system.inbox.send(ControlRequest(1, number, "server_info"))
            loop.turn()
        output = system.output
        assert isinstance(output, DetokenizerOutput)
        assert output.is_full
        assert len(output._opened) + len(output._replies) <= 40 + 8
        assert len(output._closed) <= 40 + 8
        system.outbox.refuses = lambda: False
        for _ in range(400):
            loop.turn()
        system.deliver()
        assert set(system.detokenizer.closed) == {request.handle for request in requests}
        assert len(system.detokenizer.replies) == 300
        system.check_empty()


def test_below_the_bound_aborts_are_applied_although_nobody_reads() -> None:
    with running() as system:
        loop = SchedulerLoop(system.scheduler)
        request = message(1, [1, 2, 3], max_tokens=50)
        system.inbox.send(request)
        loop.turn()
        system.outbox.refuses = lambda: True
        loop.turn()
        system.inbox.send(AbortRequest((request.handle,)))
        loop.turn()
        assert system.rows.num_running == 0


def test_a_turn_with_a_step_in_flight_sends_openings_and_tokens_in_one_message() -> None:
    with running(depth=2) as system:
        loop = SchedulerLoop(system.scheduler)
        sent: list[tuple[int, int]] = []
        for number in range(4):
            system.inbox.send(message(number, [number, 2, 3]))
            loop.turn()
            sent += [(len(batch.opened), len(handles_in(batch))) for batch in system.outbox.take()]
        assert sent == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_an_end_does_not_wait_for_the_step_in_flight() -> None:
    with running(depth=2) as system:
        loop = SchedulerLoop(system.scheduler)
        system.inbox.send(message(1, [1, 2, 3]))
        loop.turn()
        system.outbox.take()
        system.inbox.send(message(2, []))
        loop.turn()
        first, second = system.outbox.take()
        assert [len(batch.closed) for batch in (first, second)] == [1, 0]
        assert [len(handles_in(batch)) for batch in (first, second)] == [0, 1]


def test_tokens_are_packed_as_little_endian_int32() -> None:
    outbox = RecordingOutbox()
    output = make_output([outbox])
    output.add(A, [1, 70_000, 5])
    output.flush()
    assert outbox.messages[0].tokens == pack_ids([1, 70_000, 5])
