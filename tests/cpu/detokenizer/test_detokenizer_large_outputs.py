"""Logprobs of prompts and raw logits: complete, in order, before the terminal, and bounded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from detokenizer_proc import output_queues
from detokenizer_proc.loop import MAX_KEPT_BYTES
from detokenizer_proc.raw_window import RawWindow
from detokenizer_proc.router import RouterChannel
from detokenizer_proc.tensors import MAX_MESSAGE_BYTES
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import PROTOCOL_VERSION, pack_ids, unpack_floats, unpack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import (
    UNIONS,
    AbortRequest,
    Closed,
    Hello,
    OutputBatch,
    StreamOpen,
    TensorBatch,
    TensorEntry,
    TokenBatch,
    TokenLogprobs,
)
from runtime.wire.transport import SCHEMA, MessageCodec
from tests.harness.ring.detokenizer_ring import EPOCH, RAW, SLOW_S, Ring, logprobs, packed


@pytest.fixture
def ring(demo: Tokenizer) -> Ring:
    return Ring(demo)


# -- logprobs of prompts -------------------------------------------------------------------------------------


def test_a_prompt_s_logprobs_come_as_they_are_taken_and_not_later_than_the_tokens(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    two = msgspec.structs.replace(logprobs(handle, [-1.0, -2.0]), ranks=pack_ids([1, 90]))
    ring.step(prompt_logprobs=(two,))
    ring.step((handle, 70), prompt_logprobs=(logprobs(handle, [-3.0]),), logprobs=(logprobs(handle, [-0.5]),))
    ring.close(handle)
    values = [unpack_floats(output.prompt_logprobs).tolist() for output in ring.outputs]
    assert values == [[-1.0, -2.0], [-3.0], []]
    assert [len(output.token_ids) for output in ring.outputs] == [0, 4, 0]
    assert unpack_ids(ring.outputs[0].prompt_ranks).tolist() == [1, 90]
    assert unpack_ids(ring.outputs[0].prompt_top_ids).tolist() == [0, 1, 0, 1]
    assert unpack_floats(ring.outputs[0].prompt_top_logprobs).tolist() == [-1.0, -2.0, -2.0, -3.0]
    assert unpack_floats(ring.outputs[1].logprobs).tolist() == [-0.5]
    assert ring.terminal(handle).cumulative_logprob == -0.5


def test_without_streaming_a_prompt_s_logprobs_come_with_the_one_output(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stream=False)
    for value in (-1.0, -2.0):
        ring.step(prompt_logprobs=(logprobs(handle, [value], num_top=0),))
    ring.step((handle, 70))
    ring.close(handle)
    (output,) = ring.outputs
    assert unpack_floats(output.prompt_logprobs).tolist() == [-1.0, -2.0]
    assert (output.prompt_top_ids, output.logprobs) == (b"", b"")
    assert unpack_ids(output.token_ids).tolist() == [70]


def test_a_prompt_s_logprobs_that_are_long_do_not_wait_for_the_end(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stream=False)
    record = TokenLogprobs(handle, bytes(MAX_KEPT_BYTES // 2 + 4))
    ring.step(prompt_logprobs=(record,))
    assert ring.outputs == []
    ring.step(prompt_logprobs=(record,))
    ring.close(handle)
    assert [len(output.prompt_logprobs) for output in ring.outputs] == [MAX_KEPT_BYTES + 8, 0]


def test_of_a_client_that_does_not_read_only_so_many_prompt_s_logprobs_are_kept(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queues, "MAX_UNREAD_BYTES", 100)
    bulky, plain = ring.open(ring.handle(0)), ring.open(ring.handle(1))
    ring.peers.full.add(b"peer")
    ring.step((bulky, 70), (plain, 70), prompt_logprobs=(TokenLogprobs(bulky, bytes(80)),))
    assert ring.loop.num_live == 2
    ring.step(prompt_logprobs=(TokenLogprobs(bulky, bytes(24)),))
    assert ring.scheduler.drain() == [AbortRequest((bulky,))]
    ring.peers.full.clear()
    ring.step((plain, 71), closed=(Closed(plain, "length"),))
    assert ring.terminal(bulky).error.code == "lagged"
    assert not any(output.prompt_logprobs for output in ring.outputs)
    assert ring.terminal(plain).reason == "length"
    assert ring.token_ids(plain) == [70, 71]


def test_a_prompt_s_logprobs_of_sequences_that_have_ended_count_until_they_are_read(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queues, "MAX_UNREAD_BYTES", 100)

    def ask(seq: int) -> bytes:
        handle = ring.open(ring.handle(seq))
        record = TokenLogprobs(handle, bytes(80))
        ring.step((handle, 70), prompt_logprobs=(record,), closed=(Closed(handle, "length"),))
        return handle

    ring.peers.full.add(b"peer")
    handles = [ask(0), ask(1), ask(2)]
    ring.peers.full.clear()
    ring.turn()
    assert [ring.terminal(handle).reason for handle in handles] == ["length", "error", "error"]
    ring.peers.full.add(b"peer")
    assert [ask(3), ask(4)]
    ring.peers.full.clear()
    ring.turn()
    assert [ring.terminal(ring.handle(seq)).reason for seq in (3, 4)] == ["length", "error"]


def test_clients_of_one_tenant_have_together_what_a_client_may_leave_unread(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queues, "MAX_UNREAD_BYTES", 100)
    peers = {b"one": "alice", b"two": "alice", b"three": "bob"}
    ring.peers.tenants |= peers
    handles = {peer: make_handle(ring.connect(peer), 0) for peer in peers}
    ring.peers.full |= peers.keys()
    for handle in handles.values():
        ring.open(handle)
    ring.step(*((handle, 70) for handle in handles.values()))
    ring.step(prompt_logprobs=tuple(TokenLogprobs(handle, bytes(80)) for handle in handles.values()))
    aborted = [handle for abort in ring.scheduler.drain() for handle in abort.handles]
    assert sorted(aborted) == sorted((handles[b"one"], handles[b"two"]))


def test_a_client_that_reads_may_have_any_number_of_prompt_s_logprobs(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queues, "MAX_UNREAD_BYTES", 100)
    handle = ring.open(ring.handle())
    for _ in range(10):
        ring.step(prompt_logprobs=(TokenLogprobs(handle, bytes(120)),))
    ring.close(handle)
    assert sum(len(output.prompt_logprobs) for output in ring.outputs) == 1200
    assert ring.terminal(handle).reason == "length"


def test_a_prompt_s_logprobs_of_an_unknown_sequence_are_dropped(ring: Ring) -> None:
    ring.step(prompt_logprobs=(logprobs(ring.handle(), [-1.0]),))
    assert ring.outputs == []


# -- raw logits ----------------------------------------------------------------------------------------------


def entry(handle: bytes, start: int, *, name: str = "generation_logits", rows: int = 1) -> TensorEntry:
    return TensorEntry(handle, name, "float32", (rows, 2), start)


def frame(*values: float) -> bytes:
    return packed(list(values))


def send(ring: Ring, *items: tuple[TensorEntry, bytes]) -> None:
    ring.inbox.send(TensorBatch(tuple(one for one, _ in items)), [raw for _, raw in items])


def arrived(ring: Ring, peer: bytes = b"peer") -> list[tuple[bytes, int, bytes]]:
    """(handle, start, frame) of each raw frame, in order."""
    return [
        (one.handle, one.start, bytes(raw))
        for to, batch, frames in ring.peers.raw
        if to == peer
        for one, raw in zip(batch.entries, frames, strict=True)
    ]


def test_raw_logits_are_passed_on_untouched_and_before_the_terminal(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    context = entry(handle, 0, name="context_logits", rows=2)
    send(ring, (context, frame(1, 2, 3, 4)))
    ring.step((handle, 70))
    send(ring, (entry(handle, 0), frame(5, 6)))
    ring.inbox.send(TokenBatch(99, handle, pack_ids([71]), closed=(Closed(handle, "length"),)))
    ring.loop.turn(ring.now)
    assert arrived(ring) == [(handle, 0, frame(1, 2, 3, 4)), (handle, 0, frame(5, 6))]
    assert ring.peers.raw[0][1] == TensorBatch((context,))
    kinds = [type(message).__name__ for message in ring.received()]
    assert kinds == ["TensorBatch", "OutputBatch"]


def test_raw_logits_go_to_the_client_they_belong_to(ring: Ring) -> None:
    other = ring.connect(b"other")
    mine, theirs = ring.open(ring.handle()), ring.open(make_handle(other, 0))
    send(ring, (entry(mine, 0), frame(1, 1)), (entry(theirs, 0), frame(2, 2)), (entry(mine, 1), frame(3, 3)))
    ring.loop.turn(ring.now)
    assert arrived(ring) == [(mine, 0, frame(1, 1)), (mine, 1, frame(3, 3))]
    assert arrived(ring, b"other") == [(theirs, 0, frame(2, 2))]


def test_raw_logits_that_cannot_go_hold_back_what_comes_after_them(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.peers.full.add(b"peer")
    for start in range(3):
        send(ring, (entry(handle, start), frame(start, start)))
        ring.step((handle, 70), closed=(Closed(handle, "length"),) if start == 2 else ())
    assert ring.loop.is_busy
    ring.peers.full.clear()
    ring.loop.turn(ring.now)
    messages = ring.received()
    assert [type(message).__name__ for message in messages] == ["TensorBatch", "OutputBatch"]
    assert [one.start for one in messages[0].entries] == [0, 1, 2]
    assert messages[1].outputs[0].finish.reason == "length"
    assert not ring.loop.is_busy


def test_one_message_of_raw_logits_is_bounded(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    size = MAX_MESSAGE_BYTES // 2 - 4
    send(ring, *((entry(handle, start), bytes(size)) for start in range(5)))
    ring.loop.turn(ring.now)
    assert [len(frames) for _, _, frames in ring.peers.raw] == [2, 2, 1]
    assert [start for _, start, _ in arrived(ring)] == [0, 1, 2, 3, 4]


def test_raw_logits_of_no_live_sequence_and_behind_a_stop_string_are_dropped(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stop=("END",))
    ring.generate(handle, "END")
    count = len(ring.ids("END"))
    send(
        ring,
        (entry(ring.handle(5), 0), frame(9, 9)),
        (entry(handle, count - 1), frame(1, 1)),
        (entry(handle, count), frame(2, 2)),
        (entry(handle, count, name="context_logits"), frame(3, 3)),
    )
    ring.close(handle, "stop_string")
    assert arrived(ring) == [(handle, count - 1, frame(1, 1)), (handle, count, frame(3, 3))]


def test_of_additional_outputs_the_last_token_before_a_stop_string_has_no_row(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stop=("END",))
    ring.generate(handle, "one END")
    count = len(ring.ids("one END"))
    send(
        ring,
        (entry(handle, count - 2, name="generation_mlp:0"), frame(1, 1)),
        (entry(handle, count - 1, name="generation_mlp:0"), frame(2, 2)),
        (entry(handle, count, name="context_mlp:0"), frame(3, 3)),
    )
    ring.close(handle, "stop_string")
    assert arrived(ring) == [(handle, count - 2, frame(1, 1)), (handle, count, frame(3, 3))]


def test_of_a_client_that_does_not_read_only_so_many_raw_logits_are_kept(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queues, "MAX_UNREAD_BYTES", 100)
    first, second, plain = (ring.open(ring.handle(seq)) for seq in range(3))
    ring.peers.full.add(b"peer")
    ring.step((plain, 70))
    send(ring, (entry(first, 0), bytes(48)), (entry(second, 0), bytes(48)))
    ring.turn()
    assert ring.loop.num_live == 3
    send(ring, (entry(first, 1), bytes(48)))
    ring.turn()
    (abort,) = ring.scheduler.drain()
    assert set(abort.handles) == {first, second}
    ring.peers.full.clear()
    ring.step((plain, 71), closed=(Closed(plain, "length"), Closed(first, "abort")))
    assert arrived(ring) == []
    assert {ring.terminal(handle).error.code for handle in (first, second)} == {"lagged"}
    assert ring.terminal(plain).reason == "length"


def test_a_client_that_reads_may_have_any_number_of_raw_logits_in_one_step(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queues, "MAX_UNREAD_BYTES", 100)
    handle = ring.open(ring.handle())
    send(ring, *((entry(handle, start), bytes(48)) for start in range(5)))
    ring.turn()
    ring.step((handle, 70), closed=(Closed(handle, "length"),))
    assert [start for _, start, _ in arrived(ring)] == [0, 1, 2, 3, 4]
    assert ring.terminal(handle).reason == "length"


def test_raw_logits_that_wait_for_a_client_that_is_gone_are_forgotten(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.peers.gone.add(b"peer")
    send(ring, (entry(handle, 0), frame(1, 1)))
    ring.turn()
    assert ring.scheduler.drain() == [AbortRequest((handle,))]
    assert not ring.loop.is_busy
    assert not ring.loop._outputs._tensors._queues


def test_a_client_that_never_reads_its_raw_logits_is_cut_off(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.peers.full.add(b"peer")
    send(ring, (entry(handle, 0), frame(1, 1)))
    ring.turn()
    ring.now += SLOW_S
    ring.turn()
    assert ring.scheduler.drain() == [AbortRequest((handle,))]
    assert ring.loop.num_live == 0


def test_raw_logits_of_a_lower_attempt_are_dropped_with_it(ring: Ring) -> None:
    old = ring.open(ring.handle(attempt=0))
    ring.peers.full.add(b"peer")
    send(ring, (entry(old, 0), frame(1, 1)))
    ring.turn()
    new = ring.open(ring.handle(attempt=1))
    send(ring, (entry(new, 0), frame(2, 2)))
    ring.peers.full.clear()
    ring.turn()
    assert arrived(ring) == [(new, 0, frame(2, 2))]


def test_random_traffic_brings_every_frame_once_in_order_and_before_its_terminal(ring: Ring) -> None:
    rng = random.Random(5)
    handles = [ring.open(ring.handle(seq), stream=rng.random() < 0.5) for seq in range(8)]
    counts = {handle: rng.randrange(1, 12) for handle in handles}
    sent: dict[bytes, int] = dict.fromkeys(handles, 0)
    while any(sent[handle] < counts[handle] for handle in handles):
        live = [handle for handle in handles if sent[handle] < counts[handle] and rng.random() < 0.6]
        if live:
            send(ring, *((entry(handle, sent[handle]), frame(sent[handle], 0)) for handle in live))
        for handle in live:
            sent[handle] += 1
        closed = tuple(Closed(handle, "length") for handle in live if sent[handle] == counts[handle])
        ring.inbox.send(TokenBatch(1, b"".join(live), pack_ids([70] * len(live)), closed=closed))
        if rng.random() < 0.3:
            ring.peers.full = {b"peer"} - ring.peers.full
        ring.loop.turn(ring.now)
    ring.peers.full.clear()
    ring.loop.turn(ring.now)
    starts: dict[bytes, list[int]] = {handle: [] for handle in handles}
    for message in ring.received():
        for one in message.entries if isinstance(message, TensorBatch) else ():
            starts[one.handle].append(one.start)
        for output in message.outputs if isinstance(message, OutputBatch) else ():
            if output.finish is not None:
                assert starts[output.handle] == list(range(counts[output.handle]))
    assert sum(map(len, starts.values())) == sum(counts.values())


# -- the socket ----------------------------------------------------------------------------------------------


class FakeTracker:
    done = False


def test_the_window_opens_again_when_the_socket_has_passed_on_enough() -> None:
    window, trackers = RawWindow(100), [FakeTracker() for _ in range(3)]
    for tracker in trackers[:2]:
        assert window.is_open(b"a")
        window.add(b"a", tracker, 60)
    assert not window.is_open(b"a")
    assert window.is_open(b"b")
    trackers[0].done = True
    assert window.is_open(b"a")
    trackers[1].done = True
    assert window.is_open(b"a")
    assert not window._sent
    window.add(b"a", trackers[2], 1000)
    assert not window.is_open(b"a")


def test_the_window_forgets_peers_whose_frames_the_socket_has_let_go_of() -> None:
    window, trackers = RawWindow(100), [FakeTracker() for _ in range(3)]
    window.add(b"gone", trackers[0], 60)
    window.add(b"slow", trackers[1], 60)
    trackers[0].done = True
    window.add(b"new", trackers[2], 60)
    assert set(window._sent) == {b"slow", b"new"}


def test_raw_logits_wait_here_and_not_in_the_socket_of_a_client_that_does_not_read(
    demo: Tokenizer, tmp_path: Path
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    address = f"ipc://{tmp_path / 'client_out'}"
    router = RouterChannel(context, address)
    router._window = RawWindow(4 << 20)
    ring = Ring(demo, router)
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    decode = MessageCodec(UNIONS["client_out"], EPOCH).decode
    shape = (2, 1 << 17)
    raw = np.arange(1 << 18, dtype=np.float32).data.cast("B")
    num_frames = 64
    try:
        dealer.connect(address)
        dealer.send(MessageCodec(UNIONS["client_in"], 0).encode(Hello(PROTOCOL_VERSION, SCHEMA.hex())))
        while not dealer.poll(5):
            ring.loop.turn(ring.now)
        handle = make_handle(decode(dealer.recv()).client, 0)
        ring.inbox.send(TokenBatch(0, opened=(msgspec.Raw(RAW(StreamOpen(handle, 5))),)))
        ring.loop.turn(ring.now)
        for start in range(num_frames):
            one = TensorEntry(handle, "generation_logits", "float32", shape, start)
            ring.inbox.send(TensorBatch((one,)), [raw])
            ring.loop.turn(ring.now)
        ring.inbox.send(TokenBatch(1, closed=(Closed(handle, "length"),)))
        ring.loop.turn(ring.now)
        (queue,) = ring.loop._outputs._tensors._queues.values()
        assert queue.num_bytes >= raw.nbytes * num_frames // 2, "more than the window is in the socket"
        starts: list[int] = []
        reasons: list[str] = []
        while not reasons:
            ring.loop.turn(ring.now)
            while dealer.poll(5):
                head, *frames = dealer.recv_multipart(copy=False)
                message = decode(head.bytes)
                assert all(part.buffer == raw for part in frames)
                if isinstance(message, TensorBatch):
                    assert len(frames) == message.num_frames
                    starts += [one.start for one in message.entries]
                if isinstance(message, OutputBatch):
                    reasons += [output.finish.reason for output in message.outputs if output.finish]
        assert starts == list(range(num_frames))
        assert reasons == ["length"]
        assert not ring.loop.is_busy
    finally:
        dealer.close(0)
        router.close()
        context.destroy(0)
