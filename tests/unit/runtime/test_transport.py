"""Inboxes and outboxes, over ipc and in memory: order kept, nothing blocks, nothing arriving can raise."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from runtime.wire.handle import make_handle
from runtime.wire.messages import AbortRequest, StopMatched, TensorBatch, TensorEntry, TokenBatch
from runtime.wire.plan import WorkerCommand
from runtime.wire.transport import Framed, JoinedInbox, MemoryChannel, Waiter, ZmqInbox, ZmqOutbox


class Ends:
    """Opens both ends of sockets in one directory, and closes all of them with the test."""

    def __init__(self, folder: Path) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._address = f"ipc://{folder}/in"
        self._opened: list[ZmqInbox | ZmqOutbox] = []

    def inbox(self, epoch: int = 0, name: str = "scheduler_in") -> ZmqInbox:
        inbox = ZmqInbox(self._context, self._address, name, epoch)
        self._opened.append(inbox)
        return inbox

    def outbox(self, epoch: int = 0) -> ZmqOutbox:
        outbox = ZmqOutbox(self._context, self._address, epoch)
        self._opened.append(outbox)
        return outbox

    def close(self) -> None:
        for end in self._opened:
            end.close()
        self._context.destroy(linger=0)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    ends = Ends(tmp_path)
    yield ends
    ends.close()


def drain_all(inbox: ZmqInbox, count: int) -> list[Any]:
    got: list[Any] = []
    while len(got) < count and Waiter([inbox.socket]).wait(5.0):
        got += inbox.drain()
    return got


def message(n: int) -> StopMatched:
    return StopMatched(make_handle(1, n), n)


def test_ipc_keeps_order_and_is_private(ends: Ends, tmp_path: Path) -> None:
    inbox = ends.inbox(epoch=3)
    outbox = ends.outbox(epoch=3)
    for n in range(500):
        assert outbox.send(message(n))
    assert drain_all(inbox, 500) == [message(n) for n in range(500)]
    assert stat.S_IMODE((tmp_path / "in").stat().st_mode) & 0o077 == 0


def test_drain_stops_once_it_has_taken_so_many_bytes(ends: Ends) -> None:
    """Messages are handled before more are received: 48 frames of 48 MiB had taken a gigabyte."""
    inbox, outbox = ends.inbox(name="detokenizer_in"), ends.outbox()
    for n in range(10):
        if n % 2:
            outbox.send(TokenBatch(n, handles=bytes(800)))
        else:
            outbox.send(*tensors(400, 400))
    counts: list[int] = []
    while sum(counts) < 10 and Waiter([inbox.socket]).wait(5.0):
        counts.append(len(JoinedInbox([inbox]).drain(max_bytes=1000)))
    assert max(counts) <= 2


def test_drain_takes_no_more_than_its_limit(ends: Ends) -> None:
    inbox = ends.inbox(epoch=0)
    outbox = ends.outbox(epoch=0)
    for n in range(10):
        outbox.send(message(n))
    assert Waiter([inbox.socket]).wait(5.0)
    first = inbox.drain(limit=1)
    assert first == [message(0)]
    assert drain_all(inbox, 9) == [message(n) for n in range(1, 10)]


def test_a_full_outbox_refuses_and_does_not_block(ends: Ends) -> None:
    ends.inbox(epoch=0)
    outbox = ends.outbox(epoch=0)
    sent = 0
    while sent < 100_000 and outbox.send(message(0)):
        sent += 1
    assert 1000 <= sent < 100_000


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"garbage"], [b"CRSL" + b"\0" * 100], [b"a", b"b"], [b"x"] * 50],
    ids=["empty", "garbage", "other-schema", "two-parts", "fifty-parts"],
)
def test_bad_frames_are_counted_and_the_next_good_one_arrives(
    ends: Ends, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    inbox = ends.inbox(epoch=0)
    outbox = ends.outbox(epoch=0)
    outbox.socket.send_multipart(frames)
    outbox.send(message(1))
    assert drain_all(inbox, 1) == [message(1)]
    assert inbox.bad_frames.count == 1


def test_between_scheduler_and_worker_messages_of_another_epoch_are_dropped(ends: Ends) -> None:
    inbox = ends.inbox(epoch=2, name="rank_in")
    old, new = ends.outbox(epoch=1), ends.outbox(epoch=2)
    old.send(WorkerCommand("shutdown"))
    assert Waiter([inbox.socket]).wait(5.0)
    assert inbox.drain() == []
    new.send(WorkerCommand("shutdown"))
    assert drain_all(inbox, 1) == [WorkerCommand("shutdown")]
    assert inbox.bad_frames.count == 1


def test_what_a_process_sent_that_was_replaced_arrives_elsewhere(ends: Ends) -> None:
    inbox = ends.inbox(epoch=2)
    for epoch in (1, 2, 3):
        ends.outbox(epoch=epoch).send(message(epoch))
    assert set(drain_all(inbox, 3)) == {message(n) for n in (1, 2, 3)}
    assert inbox.bad_frames.count == 0


def test_memory_twin_behaves_like_the_sockets() -> None:
    channel = MemoryChannel("scheduler_in", capacity=3)
    assert [channel.send(message(n)) for n in range(4)] == [True, True, True, False]
    assert channel.drain(limit=2) == [message(0), message(1)]
    assert channel.drain() == [message(2)]
    assert channel.send(TokenBatch(1))
    assert channel.send(AbortRequest())
    assert channel.drain() == [AbortRequest()]
    assert channel.bad_frames.count == 1


def tensors(*sizes: int) -> tuple[TensorBatch, list[bytes]]:
    """A message with a raw frame of each size behind it."""
    entries = [
        TensorEntry(make_handle(1, n), "context_logits", "float32", (1, 1), 0) for n in range(len(sizes))
    ]
    return TensorBatch(tuple(entries)), [bytes([n]) * size for n, size in enumerate(sizes, 65)]


def drained(batch: Framed) -> tuple[object, list[bytes]]:
    assert isinstance(batch, Framed)
    return batch.message, [bytes(frame) for frame in batch.frames]


def test_raw_frames_arrive_with_their_message_and_as_they_were(ends: Ends) -> None:
    inbox = ends.inbox(name="detokenizer_in")
    outbox = ends.outbox()
    message, frames = tensors(4, 0, 1 << 20)
    assert outbox.send(message, frames)
    assert outbox.send(TokenBatch(1))
    first, second = drain_all(inbox, 2)
    assert drained(first) == (message, frames)
    assert second == TokenBatch(1)


@pytest.mark.parametrize("num_frames", [0, 1, 3])
def test_a_message_with_other_frames_than_it_says_is_dropped(
    ends: Ends, num_frames: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    inbox = ends.inbox(name="detokenizer_in")
    outbox = ends.outbox()
    message, _ = tensors(4, 4)
    outbox.send(message, [b"xxxx"] * num_frames)
    outbox.send(TokenBatch(1))
    assert drain_all(inbox, 1) == [TokenBatch(1)]
    assert inbox.bad_frames.count == 1


def test_memory_twin_carries_raw_frames_too() -> None:
    channel = MemoryChannel("detokenizer_in")
    message, frames = tensors(4, 8)
    assert channel.send(message, frames)
    assert channel.send(message, frames[:1])
    (batch,) = channel.drain()
    assert drained(batch) == (message, frames)
    assert channel.bad_frames.count == 1


def test_joined_inboxes_keep_each_ones_order_and_starve_none() -> None:
    busy, calm = MemoryChannel("scheduler_in"), MemoryChannel("scheduler_in")
    joined = JoinedInbox([busy, calm])
    for n in range(100):
        busy.send(message(n))
    calm.send(message(200))
    calm.send(message(201))
    received = [each for _ in range(3) for each in joined.drain(limit=10)]
    assert [each for each in received if each.num_tokens >= 200] == [message(200), message(201)]
    rest = [each for each in received if each.num_tokens < 200]
    assert rest == [message(n) for n in range(len(rest))]
    assert len(joined.drain()) == 100 - len(rest)


def test_a_wait_for_less_than_a_millisecond_is_a_wait() -> None:
    """Whoever waits for what is left of a time polled without a pause during its last millisecond."""
    reader, writer = os.pipe()
    began = time.monotonic()
    assert not Waiter([reader]).wait(0.0009)
    assert time.monotonic() - began >= 0.0009
    os.write(writer, b"1")
    assert Waiter([reader]).wait(0.0009)
    os.close(reader)
    os.close(writer)


def test_a_wait_tells_which_sockets_can_be_read(ends: Ends) -> None:
    inbox, outbox = ends.inbox(), ends.outbox()
    reader, writer = os.pipe()
    waiter, sockets = Waiter([inbox.socket, reader]), {inbox.socket}
    assert waiter.has_found(sockets), "before the first wait nothing is known"
    assert not waiter.wait(0.0)
    assert not waiter.has_found(sockets)
    os.write(writer, b"1")
    assert waiter.wait(5.0)
    assert not waiter.has_found(sockets)
    os.read(reader, 1)
    outbox.send(message(1))
    assert waiter.wait(5.0)
    assert waiter.has_found(sockets)
    os.close(reader)
    os.close(writer)
