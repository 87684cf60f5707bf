"""A detokenizer's places for clients."""

from __future__ import annotations

import pytest

from detokenizer_proc import clients
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import PROTOCOL_VERSION
from runtime.wire.messages import Hello
from runtime.wire.transport import SCHEMA
from tests.harness.ring.detokenizer_ring import Ring


@pytest.fixture
def ring(demo: Tokenizer) -> Ring:
    return Ring(demo)


def test_clients_over_tcp_leave_places_to_those_of_the_run_directory(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An HTTP server that is started again is one of these."""
    monkeypatch.setattr(clients, "MAX_CLIENTS", 5)
    monkeypatch.setattr(clients, "NUM_LOCAL_ONLY", 2)
    ring.peers.remote = {f"remote{number}".encode() for number in range(4)}
    for peer in sorted(ring.peers.remote):
        ring.say(Hello(PROTOCOL_VERSION, SCHEMA.hex()), peer)
    ring.turn()
    assert [bool(ring.received(peer)) for peer in sorted(ring.peers.remote)] == [True, True, False, False]
    assert ring.connect(b"local1")
    assert ring.connect(b"local2")
    ring.say(Hello(PROTOCOL_VERSION, SCHEMA.hex()), b"local3")
    ring.turn()
    assert not ring.received(b"local3")


def test_a_client_that_comes_back_is_noticed_before_it_is_told_that_it_may_send(ring: Ring) -> None:
    told: list[int] = []
    clients_of_ring = ring.loop._clients
    clients_of_ring.on_return = lambda: told.append(len(ring.peers.sent))
    ring.connect(b"new")
    assert (told, clients_of_ring.returned_at) == ([], 0.0)
    ring.peers.gone.add(b"peer")
    num_sent = len(ring.peers.sent)
    ring.now = 7.0
    ring.say(Hello(PROTOCOL_VERSION, SCHEMA.hex(), client=ring.client), b"again")
    ring.loop.turn(ring.now)
    assert (told, clients_of_ring.returned_at) == ([num_sent], 7.0)
    assert ring.received(b"again")[-1].client == ring.client
