"""detokenizer_proc.clients: who may connect, who is gone, and what becomes of a client that does not read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from detokenizer_proc.router import RouterChannel
from detokenizer_proc.text_stream import TextStream
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import PROTOCOL_VERSION, SILENCE_S, header, pack_ids, unpack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import (
    UNIONS,
    AbortRequest,
    Closed,
    ControlReply,
    ErrorInfo,
    Hello,
    HelloAck,
    OutputBatch,
    Ping,
    RequestFailed,
    SequenceOutput,
    StreamOpen,
    TokenBatch,
)
from runtime.wire.transport import SCHEMA, MessageCodec
from tests.harness.ring.detokenizer_ring import EPOCH, RAW, SLOW_S, Ring

TEXT = "def f(x): return '😀漢'\n"


@pytest.fixture
def ring(demo: Tokenizer) -> Ring:
    return Ring(demo)


def test_a_refusal_is_a_terminal(ring: Ring) -> None:
    error = ErrorInfo("no", "invalid_value", "top_p", 400)
    ring.inbox.send(RequestFailed(ring.handle(), error))
    ring.turn()
    assert (ring.terminal(ring.handle()).reason, ring.terminal(ring.handle()).error) == ("error", error)


def test_a_control_reply_goes_to_the_client_that_asked(ring: Ring) -> None:
    ring.connect(b"other")
    ring.inbox.send(ControlReply(ring.client, 4, msgspec.Raw(RAW({"model": "demo"}))))
    ring.loop.turn(ring.now)
    (reply,) = ring.received()
    assert (reply.number, msgspec.msgpack.decode(reply.body)) == (4, {"model": "demo"})
    assert ring.received(b"other") == []


def test_a_sequence_of_an_unknown_client_is_aborted(ring: Ring) -> None:
    handle = make_handle(12345, 0)
    ring.open(handle)
    assert ring.scheduler.drain() == [AbortRequest((handle,))]
    assert ring.loop.num_live == 0


def test_a_client_that_is_gone_is_aborted_once_and_its_sequences_forgotten(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.peers.gone.add(b"peer")
    ring.generate(handle, TEXT)
    ring.close(handle)
    assert ring.scheduler.drain() == [AbortRequest((handle,))]
    assert ring.loop.num_live == 0
    assert not ring.loop.is_busy


@pytest.mark.parametrize("away_s", [0.0, SILENCE_S + 1.0])
def test_what_a_client_makes_again_over_a_new_connection_is_not_aborted_with_the_old_one(
    ring: Ring, away_s: float
) -> None:
    handle = ring.open(ring.handle())
    ring.now += away_s
    ring.turn()
    ring.peers.gone.add(b"peer")
    ring.say(Hello(PROTOCOL_VERSION, SCHEMA.hex(), client=ring.client), b"again")
    ring.turn()
    assert [ack.client for ack in ring.received(b"again")] == [ring.client]
    # Whatever names the client would meet its further attempts, which come by another way.
    assert ring.scheduler.drain() == [AbortRequest((handle,))]
    assert ring.loop.num_live == 0


def test_a_client_whose_ping_waits_is_not_taken_for_silent_after_a_pause_of_this_process(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.say(Ping(ring.client))
    ring.loop.turn(ring.now, have_clients_sent=False)
    assert ring.peers.incoming, "nothing was to be read"
    ring.now += SILENCE_S + 1.0
    # The wait ended before the ping came, and then the process was stopped.
    ring.loop.turn(ring.now, have_clients_sent=False)
    assert not ring.peers.incoming
    ring.generate(handle, TEXT)
    assert ring.text(handle) == TEXT


def test_a_client_that_does_not_read_gets_everything_in_one_output_later(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.generate(handle, "a")
    ring.peers.full.add(b"peer")
    ring.generate(handle, TEXT)
    assert ring.loop.is_busy
    ring.peers.full.clear()
    ring.num_batches = 0
    ring.turn()
    assert ring.num_batches == 1
    assert ring.text(handle) == "a" + TEXT
    assert ring.token_ids(handle) == ring.ids("a") + ring.ids(TEXT)


def test_a_client_that_does_not_read_for_too_long_is_cut_off(ring: Ring) -> None:
    handles = [ring.open(ring.handle(seq)) for seq in range(2)]
    ring.peers.full.add(b"peer")
    ring.step(*((handle, 70) for handle in handles))
    ring.now += SLOW_S - 1
    ring.say(Ping(ring.client))
    ring.turn()
    assert ring.loop.num_live == 2
    ring.now += 1
    ring.turn()
    (abort,) = ring.scheduler.drain()
    assert sorted(abort.handles) == sorted(handles)
    assert ring.loop.num_live == 0
    ring.peers.full.clear()
    ring.step((handles[0], 71), closed=tuple(Closed(handle, "abort") for handle in handles))
    for handle in handles:
        assert ring.token_ids(handle) == [70]
        assert (ring.terminal(handle).reason, ring.terminal(handle).error.code) == ("error", "lagged")


def test_what_a_client_does_not_read_costs_nothing_until_it_reads_again(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = ring.open(ring.handle())
    ring.peers.full.add(b"peer")
    ring.generate(handle, "a")
    num_encoded = 0
    output = TextStream.output

    def counted(stream: TextStream) -> SequenceOutput:
        nonlocal num_encoded
        num_encoded += 1
        return output(stream)

    monkeypatch.setattr(TextStream, "output", counted)
    for _ in range(50):
        ring.step((handle, 70))
    assert num_encoded == 0
    ring.peers.full.clear()
    ring.turn()
    assert num_encoded == 1
    assert ring.token_ids(handle) == ring.ids("a") + [70] * 50


def test_sequences_opened_while_their_client_lags_end_at_once(ring: Ring) -> None:
    ring.step((ring.open(ring.handle()), 70))
    ring.peers.full.add(b"peer")
    ring.step((ring.handle(), 70))
    ring.now += SLOW_S + 1
    ring.say(Ping(ring.client))
    ring.turn()
    ring.open(ring.handle(1))
    assert ring.loop.num_live == 0
    assert AbortRequest((ring.handle(1),)) in ring.scheduler.drain()
    ring.peers.full.clear()
    ring.turn()
    assert ring.terminal(ring.handle(1)).error.code == "lagged"


def test_a_client_that_never_reads_is_dropped_in_the_end(ring: Ring) -> None:
    ring.step((ring.open(ring.handle()), 70))
    ring.peers.full.add(b"peer")
    ring.step((ring.handle(), 70))
    for _ in range(int(2 * SLOW_S)):
        ring.now += 1.0
        ring.say(Ping(ring.client))
        ring.inbox.send(RequestFailed(ring.handle(7), ErrorInfo("no")))
        ring.turn()
    assert ring.scheduler.drain() == [AbortRequest((ring.handle(),))]
    assert not ring.loop.is_busy


def test_what_a_client_leaves_unread_is_bounded(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detokenizer_proc.output_queues.MAX_UNREAD", 100)
    ring.peers.full.add(b"peer")
    for number in range(60):
        ring.inbox.send(RequestFailed(ring.handle(number), ErrorInfo("no")))
        ring.inbox.send(ControlReply(ring.client, number, msgspec.Raw(RAW({}))))
        ring.turn()
    assert ring.loop._clients.get(ring.client) is None
    assert not ring.loop.is_busy


def test_a_reader_that_comes_back_in_time_is_not_cut_off(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    for _ in range(4):
        ring.peers.full.add(b"peer")
        ring.step((handle, 70))
        ring.now += SLOW_S / 2
        ring.say(Ping(ring.client))
        ring.peers.full.clear()
        ring.turn()
    assert ring.loop.num_live == 1
    assert ring.token_ids(handle) == [70] * 4


# -- greeting and liveness -----------------------------------------------------------------------------------


def test_every_connection_gets_an_id_that_cannot_be_guessed(ring: Ring) -> None:
    ids = {ring.connect(b"peer%d" % n) for n in range(50)}
    assert len(ids) == 50
    assert 0 not in ids
    assert sum(client.bit_count() for client in ids) > 50 * 20, "false alarm with a probability below 1e-60"


def test_a_second_hello_of_a_connection_gets_the_same_id(ring: Ring) -> None:
    assert ring.connect(b"peer") == ring.client


def test_a_peer_of_another_version_gets_the_bare_header(ring: Ring) -> None:
    own = MessageCodec(UNIONS["client_in"], 0).encode(Hello(PROTOCOL_VERSION, SCHEMA.hex()))
    other_version = own[:4] + b"\xff\xff" + own[6:]
    other_schema = own[:6] + bytes(6) + own[12:]
    for frame in (other_version, other_schema):
        ring.peers.incoming.append((b"stranger", frame))
        ring.turn()
        assert ring.peers.sent == [(b"stranger", header(SCHEMA, EPOCH))]
        ring.peers.sent.clear()


def test_nothing_that_a_peer_sends_raises_or_is_answered(ring: Ring) -> None:
    rng = random.Random(0)
    hello = MessageCodec(UNIONS["client_in"], 0).encode(Hello(PROTOCOL_VERSION, SCHEMA.hex()))
    ping = MessageCodec(UNIONS["client_in"], EPOCH).encode(Ping(1))
    frames = [
        b"",
        b"x",
        hello[:3],
        hello[:16],
        hello[:-3],
        hello + b"x",
        ping[:17],
        ping,
        hello[:16] + b"\xc1",
    ]
    frames += [hello[:16] + rng.randbytes(rng.randrange(40)) for _ in range(2000)]
    frames += [rng.randbytes(rng.randrange(40)) for _ in range(2000)]
    for peer in (b"stranger", b"peer"):
        for frame in frames:
            ring.peers.incoming.append((peer, frame))
        ring.loop.turn(ring.now)
        assert ring.received(peer) == []
    handle = ring.open(ring.handle())
    ring.generate(handle, TEXT)
    assert ring.text(handle) == TEXT


def test_idle_clients_are_pinged_each_second_and_busy_ones_are_not(ring: Ring) -> None:
    other = b"other"
    ring.connect(other)
    handle = ring.open(ring.handle())
    num_pings = {b"peer": 0, other: 0}
    for _ in range(40):
        ring.now += 0.25
        ring.step((handle, 70))
        for peer in num_pings:
            num_pings[peer] += sum(isinstance(message, Ping) for message in ring.received(peer))
    assert num_pings == {b"peer": 0, other: 10}


def test_a_client_that_is_silent_for_fifteen_seconds_is_gone(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    for _ in range(20):
        ring.now += 1.0
        ring.say(Ping(ring.client))
        ring.turn()
    assert ring.loop.num_live == 1
    ring.now += 14.9
    ring.turn()
    assert ring.loop.num_live == 1
    ring.now += 0.5
    ring.turn()
    assert ring.loop.num_live == 0
    assert ring.scheduler.drain() == [AbortRequest((handle,))]
    ring.say(Ping(ring.client))
    ring.step((handle, 70))
    assert ring.outputs == []


def test_outputs_too_large_for_one_message_go_in_several(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detokenizer_proc.clients.MAX_BATCH_BYTES", 200)
    handles = [ring.open(ring.handle(seq), stream=False) for seq in range(7)]
    for handle in handles:
        ring.generate(handle, TEXT)
    ring.step(closed=tuple(Closed(handle, "length") for handle in handles))
    assert ring.num_batches > 2
    assert [output.handle for output in ring.outputs] == handles
    assert {ring.text(handle) for handle in handles} == {TEXT}


# -- the real socket -----------------------------------------------------------------------------------------


def test_a_dealer_is_greeted_served_and_missed_over_a_real_socket(demo: Tokenizer, tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    address = f"ipc://{tmp_path / 'client_out'}"
    router = RouterChannel(context, address)
    ring = Ring(demo, router)
    dealer, spy = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    codec_in, codec_out = MessageCodec(UNIONS["client_in"], 0), MessageCodec(UNIONS["client_out"], EPOCH)

    def turn_until_readable(socket: zmq.Socket[Any]) -> Any:
        for _ in range(1000):
            ring.loop.turn(ring.now)
            if socket.poll(5):
                return codec_out.decode(socket.recv())
        raise TimeoutError

    try:
        dealer.connect(address)
        spy.connect(address)
        spy.send(b"garbage")
        spy.send_multipart([b"too", b"many", b"frames"])
        dealer.send(codec_in.encode(Hello(PROTOCOL_VERSION, SCHEMA.hex())))
        ack = turn_until_readable(dealer)
        assert isinstance(ack, HelloAck)
        handle = make_handle(ack.client, 0)
        opened = msgspec.Raw(RAW(StreamOpen(handle, 5, stream=True)))
        ring.inbox.send(TokenBatch(0, handle, pack_ids(demo.encode_batch(["a"])[0]), (opened,)))
        output = turn_until_readable(dealer)
        assert isinstance(output, OutputBatch)
        assert output.outputs[0].text == "a"
        assert spy.poll(0) == 0
        dealer.close(0)
        for _ in range(1000):
            ring.now += 0.5
            ring.loop.turn(ring.now)
            if ring.loop.num_live == 0:
                break
            spy.poll(5)
        assert ring.scheduler.drain() == [AbortRequest((handle,))]
    finally:
        router.close()
        context.destroy(linger=0)


def test_a_dealer_that_does_not_read_holds_up_nobody_and_misses_nothing(
    demo: Tokenizer, tmp_path: Path
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    address = f"ipc://{tmp_path / 'client_out'}"
    router = RouterChannel(context, address)
    ring = Ring(demo, router)
    decode = MessageCodec(UNIONS["client_out"], EPOCH).decode

    def connect() -> tuple[zmq.Socket[Any], int]:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(address)
        dealer.send(MessageCodec(UNIONS["client_in"], 0).encode(Hello(PROTOCOL_VERSION, SCHEMA.hex())))
        while not dealer.poll(5):
            ring.loop.turn(ring.now)
        return dealer, decode(dealer.recv()).client

    def read(dealer: zmq.Socket[Any], num_missing: int = 0) -> list[int]:
        ids: list[int] = []
        while dealer.poll(500 if len(ids) < num_missing else 5):
            message = decode(dealer.recv())
            if isinstance(message, OutputBatch):
                ids += unpack_ids(b"".join(output.token_ids for output in message.outputs)).tolist()
        return ids

    try:
        (idle, idle_id), (reader, reader_id) = connect(), connect()
        handles = [make_handle(idle_id, 0), make_handle(reader_id, 0)]
        ring.step(opened=tuple(StreamOpen(handle, 5, stream=True) for handle in handles))
        sent: list[int] = []
        got: list[int] = []
        # 4 kB a step fill whatever the kernel and the sockets hold.
        while not ring.loop.is_busy:
            tokens = [(70 + len(sent)) % 4096] * 1000
            sent += tokens
            ring.step(*((handle, token) for handle in handles for token in tokens))
            got += read(reader)
            assert len(sent) < 10_000_000
        assert got + read(reader, len(sent) - len(got)) == sent
        rest = read(idle)
        while ring.loop.is_busy:
            ring.loop.turn(ring.now)
            rest += read(idle)
        assert rest + read(idle, len(sent) - len(rest)) == sent
    finally:
        router.close()
        context.destroy(linger=0)
