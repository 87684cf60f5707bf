"""Several detokenizers, each with two ways in: whose clients are whose, what they are told of the ring."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest

from detokenizer_proc.clients import STATUS_S, Clients, RingShape
from detokenizer_proc.router import Delivery, JoinedChannels
from runtime.wire.format import PROTOCOL_VERSION, SILENCE_S
from runtime.wire.messages import UNIONS, Hello, HelloAck, Ping
from runtime.wire.status_page import RingStatus
from runtime.wire.transport import SCHEMA, MessageCodec
from tests.harness.ring.detokenizer_ring import SECRET, FakePeers

T = TypeVar("T")
EPOCH = 3
ALONE = RingShape()
READY = RingStatus("ready", 2, 1, 30)
_codec = MessageCodec(UNIONS["client_out"], EPOCH)


def hello(*, wants_status: bool = False) -> bytes:
    return MessageCodec(UNIONS["client_in"], 0).encode(Hello(PROTOCOL_VERSION, SCHEMA.hex(), wants_status))


class Lane:
    """The clients of one detokenizer, whose ring is as the test says."""

    def __init__(self, shape: RingShape = ALONE) -> None:
        self.peers = FakePeers()
        self.status = READY
        self.clients = Clients(self.peers, EPOCH, SECRET, shape, ring_status=lambda: self.status)
        self.now = 100.0

    def connect(self, peer: bytes, *, wants_status: bool = False) -> HelloAck:
        self.peers.incoming.append((peer, hello(wants_status=wants_status)))
        self.clients.receive(self.now)
        return self.received(peer, HelloAck)[-1]

    def ping(self, peer: bytes, client: int) -> None:
        self.peers.incoming.append((peer, MessageCodec(UNIONS["client_in"], EPOCH).encode(Ping(client))))
        self.clients.receive(self.now)

    def received(self, peer: bytes, kind: type[T]) -> list[T]:
        messages = [_codec.decode(frame) for to, frame in self.peers.sent if to == peer]
        return [message for message in messages if isinstance(message, kind)]

    def statuses(self, peer: bytes) -> list[RingStatus]:
        """Return what it was told since this was asked last."""
        told = self.received(peer, RingStatus)
        self.peers.sent.clear()
        return told


def test_a_client_of_a_detokenizer_has_an_id_that_says_so_and_learns_the_rings_shape() -> None:
    for index in range(3):
        lane = Lane(RingShape(index, num_tokenizers=2, num_detokenizers=3, max_waiting=77))
        acks = [lane.connect(bytes([peer])) for peer in range(50)]
        assert {ack.client % 3 for ack in acks} == {index}
        assert len({ack.client for ack in acks}) == 50
        assert all(ack.client > 0 for ack in acks)
        assert {(ack.num_tokenizers, ack.num_detokenizers, ack.max_waiting) for ack in acks} == {(2, 3, 77)}


def test_who_wants_it_is_told_how_the_ring_is_each_second_and_nobody_else() -> None:
    lane = Lane()
    watcher = lane.connect(b"watcher", wants_status=True)
    other = lane.connect(b"other")
    lane.clients.maintain(lane.now)
    assert lane.received(b"other", RingStatus) == []
    assert lane.statuses(b"watcher") == [READY]
    for _ in range(40):
        lane.now += STATUS_S / 4
        lane.ping(b"watcher", watcher.client)
        lane.ping(b"other", other.client)
        lane.clients.maintain(lane.now)
    assert lane.received(b"other", RingStatus) == []
    assert lane.statuses(b"watcher") == [READY] * 10


def test_another_state_of_the_ring_is_told_at_once() -> None:
    lane = Lane()
    lane.connect(b"watcher", wants_status=True)
    lane.clients.maintain(lane.now)
    assert lane.statuses(b"watcher") == [READY]
    lane.status = msgspec.structs.replace(READY, num_running=9)
    lane.clients.maintain(lane.now)
    assert lane.statuses(b"watcher") == []
    lane.status = msgspec.structs.replace(READY, state="draining")
    lane.clients.maintain(lane.now)
    assert lane.statuses(b"watcher") == [lane.status]


@pytest.mark.parametrize(
    ("state", "last"), [("ready", "absent"), ("draining", "absent"), ("failed", "failed")]
)
def test_a_detokenizer_that_ends_says_so_to_those_who_cannot_see_it(state: str, last: str) -> None:
    lane = Lane()
    lane.connect(b"watcher", wants_status=True)
    lane.clients.maintain(lane.now)
    lane.status = msgspec.structs.replace(READY, state=state)
    lane.statuses(b"watcher")
    lane.clients.say_farewell(lane.now)
    assert [status.state for status in lane.statuses(b"watcher")] == [last]


def test_a_watcher_that_does_not_read_or_is_gone_holds_up_no_other() -> None:
    lane = Lane()
    for peer in (b"full", b"gone", b"silent", b"reads"):
        ack = lane.connect(peer, wants_status=True)
    lane.peers.full.add(b"full")
    lane.peers.gone.add(b"gone")
    lane.clients.maintain(lane.now)
    assert lane.statuses(b"reads") == [READY]
    assert len(lane.clients.take_gone()) == 1
    lane.now += SILENCE_S + 1
    lane.ping(b"reads", ack.client)
    lane.clients.maintain(lane.now)
    assert len(lane.clients.take_gone()) == 2
    lane.now += STATUS_S
    lane.peers.sent.clear()
    lane.clients.maintain(lane.now)
    assert {peer for peer, _ in lane.peers.sent} == {b"reads"}


def test_peers_with_the_same_id_on_two_sockets_are_two_peers() -> None:
    local, remote = FakePeers(), FakePeers()
    joined = JoinedChannels((local, remote))
    local.incoming.append((b"same", b"from local"))
    remote.incoming.append((b"same", b"from remote"))
    (first, one, _), (second, two, _) = joined.drain(10)
    assert (one, two) == (b"from local", b"from remote")
    assert first != second
    assert joined.send(second, b"to remote") is Delivery.SENT
    assert joined.send(first, b"to local") is Delivery.SENT
    assert (local.sent, remote.sent) == ([(b"same", b"to local")], [(b"same", b"to remote")])
    remote.gone.add(b"same")
    assert joined.send(second, b"x") is Delivery.GONE
    assert joined.send(first, b"x") is Delivery.SENT
