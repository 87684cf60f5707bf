"""A detokenizer's places for clients."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from detokenizer_proc import clients
from runtime.ring.tenants import OWNER
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import PROTOCOL_VERSION
from runtime.wire.messages import Hello, Ping
from runtime.wire.status_page import ProcessState, RingStatus
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


def hello_of(tenant: str, ring: Ring, peer: bytes, **fields: Any) -> list[Any]:
    """Return the answer to a client over TCP with the key of `tenant`."""
    ring.peers.remote.add(peer)
    ring.peers.tenants[peer] = tenant
    ring.say(Hello(PROTOCOL_VERSION, SCHEMA.hex(), **fields), peer)
    ring.turn()
    return ring.received(peer)


def test_one_tenant_takes_no_more_places_than_it_leaves(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_CLIENTS", 42)
    monkeypatch.setattr(clients, "NUM_LOCAL_ONLY", 1)
    monkeypatch.setattr(clients, "NUM_OF_EACH_TENANT", 4)

    numbers = itertools.count()

    def flood(tenant: str) -> int:
        """How many more of a tenant's clients get in."""
        peers = [f"{tenant}{next(numbers)}".encode() for _ in range(50)]
        return sum(bool(hello_of(tenant, ring, peer)) for peer in peers)

    assert flood("a") == 20
    assert flood("b") == 10
    assert [flood(tenant) for tenant in "cdef"] == [5, 4, 1, 0], (
        "some more are in before nobody finds a place"
    )
    for number in range(3):
        ring.peers.gone.add(f"a{number}".encode())
    ring.now += 2.0
    ring.turn()
    assert flood("a") == 0, "it has more than are free"
    assert flood("f") == 3
    assert ring.connect(b"local")


def test_an_owner_over_tcp_has_no_share_of_the_places(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_CLIENTS", 42)
    monkeypatch.setattr(clients, "NUM_LOCAL_ONLY", 1)
    assert sum(bool(hello_of(OWNER, ring, b"%d" % number)) for number in range(50)) == 40


@pytest.mark.parametrize("is_gone", [True, False])
def test_nobody_gets_the_id_of_another_tenants_client(ring: Ring, is_gone: bool) -> None:
    """Not even when its owner has gone, or this process has just taken the place of the one that drew it."""
    (ack,) = hello_of("alice", ring, b"alice")
    if is_gone:
        ring.peers.gone.add(b"alice")
        ring.now += 2.0  # it is pinged, and so missed
        ring.turn()
    for tenant in ("bob", OWNER):
        assert hello_of(tenant, ring, tenant.encode() + b"!", client=ack.client) == []
    (own,) = hello_of("bob", ring, b"bob")
    assert own.client != ack.client
    if is_gone:
        (again,) = hello_of("alice", ring, b"alice2", client=ack.client)
        assert again.client == ack.client
    holder = ring.loop._clients.get(ack.client)
    assert holder is not None
    assert holder.tenant == "alice"


def test_who_comes_with_a_key_that_is_another_tenants_now_has_to_begin_anew(ring: Ring) -> None:
    (ack,) = hello_of("alice", ring, b"peer1")
    ring.peers.tenants[b"peer1"] = "carol"
    ring.say(Ping(ack.client), b"peer1")
    ring.turn()
    assert ring.loop._clients.get(ack.client) is None
    (again,) = hello_of("carol", ring, b"peer1")
    assert again.client != ack.client


def test_a_user_is_told_that_the_ring_lives_and_nothing_of_what_others_do(ring: Ring) -> None:
    status = RingStatus("ready", 5, 6, 7, ProcessState(3), (ProcessState(1),), (ProcessState(2),))
    ring.loop._clients._ring_status = lambda: status
    ring.loop._clients._sees_load = lambda tenant: tenant == "operator"
    told = {}
    for tenant in ("alice", "operator"):
        assert hello_of(tenant, ring, tenant.encode(), wants_status=True)
        ring.now += 1.0
        ring.turn()
        told[tenant] = ring.received(tenant.encode())[-1]
    assert told["operator"] == status
    assert told["alice"] == msgspec.structs.replace(status, num_running=0, num_waiting=0, num_free_pages=0)
