"""The way in over TCP: who has a key comes in, everybody else gets no further than the handshake."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from zmq.auth import load_certificate

from runtime.base.errors import AddressInUse, ConfigError
from runtime.ring.endpoints import TcpEndpoints
from runtime.ring.keys import make_keys
from runtime.ring.peer_limits import Peer, PeerLimits
from runtime.ring.tcp_gate import TcpGate
from runtime.ring.tenants import OWNER
from runtime.wire.messages import AbortRequest
from runtime.wire.transport import MAX_TCP_FRAME_BYTES, MessageCodec, Waiter, ZmqInbox
from tests.harness.http.web_page import post_of_frames
from tests.harness.ring.launched import SLACK, free_ports, wait_until

FRAME = MessageCodec(AbortRequest, 0).encode(AbortRequest())
LET_IN_S = 5.0 * SLACK
# A peer that is let in over loopback is so within a hundredth of this.
KEPT_OUT_S = 0.3


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["client", "other"])
    return tmp_path / "keys"


@contextmanager
def open_gate(curve_dir: Path, **options: Any) -> Iterator[tuple[TcpGate, ZmqInbox, str]]:
    """A gate, and an inbox of it that says of each abort whose it is."""
    tcp = TcpEndpoints.parse(f"tcp://127.0.0.1:{free_ports(2)}", 1, 1)
    gate = TcpGate(tcp, curve_dir, **options)

    def stamp(message: Any, key: str) -> Any:
        return msgspec.structs.replace(message, tenant=gate.tenant_of(key))

    try:
        yield gate, gate.inbox(tcp.tokenizer_in(0), "tokenizer_in", 0, stamp), tcp.tokenizer_in(0)
    finally:
        gate.close()


@contextmanager
def open_inbox(curve_dir: Path) -> Iterator[tuple[ZmqInbox, str]]:
    with open_gate(curve_dir) as (_, inbox, address):
        yield inbox, address


class Peers:
    """Those who try to come in."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[zmq.Socket[Any]] = []

    def knock(self, address: str, client: Path | None = None, server: Path | None = None) -> zmq.Socket[Any]:
        """Connect with the keys in `client`, for the server whose key is in `server`, and send a message.

        A peer that is refused before it sends has no connection left to send over, and waits for none.
        """
        peer: zmq.Socket[Any] = self.context.socket(zmq.PUSH)
        peer.setsockopt(zmq.SNDHWM, 1)
        self._sockets.append(peer)
        if client is not None:
            peer.curve_publickey, peer.curve_secretkey = load_certificate(client / "client.key_secret")
            peer.curve_serverkey, _ = load_certificate((server or client) / "server.key")
        peer.connect(address)
        with suppress(zmq.Again):
            peer.send(FRAME, zmq.NOBLOCK)
        return peer


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.context.destroy(linger=0)


def comes_in(inbox: ZmqInbox, timeout_s: float) -> bool:
    return whose_comes_in(inbox, timeout_s) is not None


def whose_comes_in(inbox: ZmqInbox, timeout_s: float = LET_IN_S) -> str | None:
    if not Waiter([inbox.socket]).wait(timeout_s):
        return None
    tenants: list[str] = [abort.tenant for abort in inbox.drain()]
    return tenants[0] if len(tenants) == 1 else None


def test_with_keys_only_those_who_have_one_come_in(keys: Path, tmp_path: Path, peers: Peers) -> None:
    make_keys(tmp_path / "elsewhere")
    stranger = tmp_path / "elsewhere" / "client"
    with open_inbox(keys) as (inbox, address):
        peers.knock(address)
        peers.knock(address, stranger)
        peers.knock(address, stranger, server=keys / "client")
        peers.knock(address, keys / "client", server=stranger)
        assert not comes_in(inbox, KEPT_OUT_S)
        peers.knock(address, keys / "client")
        assert comes_in(inbox, LET_IN_S)
        peers.knock(address, keys / "other")
        assert comes_in(inbox, LET_IN_S)
        assert inbox.bad_frames.count == 0


def test_what_comes_is_the_tenants_whose_key_it_came_with(keys: Path, peers: Peers) -> None:
    with open_gate(keys) as (_, inbox, address):
        for name in ("client", "other", "client"):
            peers.knock(address, keys / name)
            assert whose_comes_in(inbox) == name
    with open_gate(keys, is_own=True) as (_, inbox, address):
        peers.knock(address, keys / "other")
        assert whose_comes_in(inbox) == OWNER


def test_keys_that_are_read_again_let_in_and_lock_out(
    keys: Path, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    with open_gate(keys) as (gate, inbox, address):
        make_keys(keys, ["late"])
        standing = peers.knock(address, keys / "other")
        assert whose_comes_in(inbox) == "other"
        peers.knock(address, keys / "late")
        assert not comes_in(inbox, KEPT_OUT_S)
        (keys / "clients" / "other.key").unlink()
        gate.reload()
        wait_until(
            lambda: len(gate._tenants) == 2 and "other" not in gate._tenants.values(),
            LET_IN_S,
            "they are read",
        )
        # Who was refused once is not heard again before ZMQ tries anew, so another one knocks.
        peers.knock(address, keys / "late")
        assert whose_comes_in(inbox) == "late"
        standing.send(FRAME)
        wait_until(lambda: not inbox.drain() and inbox.bad_frames.count == 1, LET_IN_S, "it is dropped")
        (keys / "clients" / "a b.key").write_text("no key")
        gate.reload()
        wait_until(lambda: "keys stay as they were" in caplog.text, LET_IN_S, "they are read")
        peers.knock(address, keys / "client")
        assert whose_comes_in(inbox) == "client"


def test_where_nobody_authenticates_nobody_comes_in(keys: Path, peers: Peers) -> None:
    """Without the rule that enforces it, ZMQ would then let every key in."""
    tcp = TcpEndpoints.parse(f"tcp://127.0.0.1:{free_ports(2)}", 1, 1)
    with closing(TcpGate(tcp, keys)) as gate:
        inbox = ZmqInbox(peers.context, tcp.tokenizer_in(0), "tokenizer_in", 0, bind=gate.bind)
        peers.knock(tcp.tokenizer_in(0), keys / "client")
        assert not comes_in(inbox, KEPT_OUT_S)
        inbox.close()


def test_a_key_is_no_longer_let_in_once_its_file_is_gone_and_the_server_started_again(
    keys: Path, peers: Peers
) -> None:
    (keys / "clients" / "other.key").unlink()
    with open_inbox(keys) as (inbox, address):
        peers.knock(address, keys / "other")
        assert not comes_in(inbox, KEPT_OUT_S)
        peers.knock(address, keys / "client")
        assert comes_in(inbox, LET_IN_S)


def test_bytes_of_other_protocols_and_half_handshakes_are_no_bother(
    keys: Path, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01"
    mechanism = b"CURVE".ljust(20, b"\0")
    openings = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\xff" * 64,
        b"\x01\0",
        post_of_frames(FRAME),
        greeting[:10],
        greeting + mechanism + b"\0" * 32,
        greeting + mechanism + b"\0" * 32 + b"\x06\xff\xff\xff\xff\xff\xff\xff\xff",
        greeting + mechanism + b"\0" * 32 + b"\x04\x05HELLO" + b"\x07" * 300,
    ]
    with open_inbox(keys) as (inbox, address):
        host, port = address.removeprefix("tcp://").split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in openings]
        for stranger, opening in zip(strangers, openings, strict=True):
            stranger.sendall(opening)
        peers.knock(address, keys / "client")
        assert comes_in(inbox, LET_IN_S)
        for stranger in strangers:
            stranger.close()
        peers.knock(address, keys / "client")
        assert comes_in(inbox, LET_IN_S)


def test_what_a_peer_can_fill_is_bounded(keys: Path, peers: Peers) -> None:
    """Whatever its server reads: in messages that ZMQ holds for it, and in the length of each."""
    with open_inbox(keys) as (inbox, address):
        sender = peers.knock(address, keys / "client")
        assert comes_in(inbox, LET_IN_S)
        num_sent = 0
        while num_sent < 200 and sender.poll(200, zmq.POLLOUT):
            sender.send(bytes(1 << 20))
            num_sent += 1
        assert num_sent < 64  # with what the kernel holds of a connection
        wait_until(lambda: not inbox.drain() and inbox.bad_frames.count == num_sent, LET_IN_S, "all is read")
        too_long = peers.knock(address, keys / "other")
        assert comes_in(inbox, LET_IN_S)
        too_long.send(bytes(MAX_TCP_FRAME_BYTES + 1))
        assert not comes_in(inbox, KEPT_OUT_S)
        peers.knock(address, keys / "client")
        assert comes_in(inbox, LET_IN_S)
        assert inbox.bad_frames.count == num_sent


@contextmanager
def open_small_inbox(
    curve_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TcpGate, ZmqInbox, str]]:
    """An inbox whose peers may each fill 6 MiB: four messages, one on its way, and one for the kernel."""
    monkeypatch.setattr("runtime.ring.peer_limits.max_kernel_bytes", lambda: 1 << 20)
    monkeypatch.setattr("runtime.ring.tcp_gate.MAX_TCP_FRAME_BYTES", 1 << 20)
    with open_gate(curve_dir) as opened:
        yield opened


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG_FRAME = b"\x06" + MAX_TCP_FRAME_BYTES.to_bytes(8, "big") + b"\x05HELLO"


def has_ended(stranger: socket.socket) -> bool:
    """Return True if the server has closed a connection. What it has sent is dropped."""
    stranger.setblocking(False)
    try:
        while stranger.recv(1 << 10):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_a_stranger_fills_no_frame(
    keys: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A handshake has less than a kilobyte, but ZMQ holds a frame of any length that a message may have."""
    monkeypatch.setattr("runtime.ring.tcp_gate.HANDSHAKE_MS", 600_000)
    with open_inbox(keys) as (inbox, address):
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as stranger:
            with suppress(OSError):
                stranger.sendall(GREETING + LONG_FRAME + bytes(64 << 10))
            wait_until(lambda: has_ended(stranger), LET_IN_S, "the connection is closed")
        assert "more bytes than a handshake has" in caplog.text
        peers.knock(address, keys / "client")
        assert comes_in(inbox, LET_IN_S)


def test_of_many_strangers_the_oldest_lose_their_places_and_no_client(
    keys: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would hold 14 KB and a descriptor until its time for a handshake is over."""
    monkeypatch.setattr("runtime.ring.tcp_gate.HANDSHAKE_MS", 600_000)
    monkeypatch.setattr("runtime.ring.peer_limits.MAX_STRANGERS", 4)
    with open_gate(keys) as (gate, inbox, address), ExitStack() as opened:
        client = peers.knock(address, keys / "client")
        assert comes_in(inbox, LET_IN_S)
        host, port = address.removeprefix("tcp://").split(":")
        strangers = []
        for number in range(12):
            stranger = opened.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(GREETING[: 40 * number])
            strangers.append(stranger)
        wait_until(lambda: all(map(has_ended, strangers[:8])), LET_IN_S, "the oldest are closed")
        assert not any(map(has_ended, strangers[8:]))
        assert len(gate.limits._peers) == 5
        client.send(FRAME)
        assert comes_in(inbox, LET_IN_S)


def test_a_message_of_endless_frames_is_not_held(
    keys: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ZMQ holds all of its frames until the last one has come, however many there are."""
    with open_small_inbox(keys, monkeypatch) as (_, inbox, address):
        endless = peers.knock(address, keys / "client")
        assert comes_in(inbox, LET_IN_S)
        endless.send_multipart([FRAME] + [bytes(1_000_000)] * 400, copy=False)
        wait_until(lambda: "without a message" in caplog.text, LET_IN_S, "the connection is closed")
        peers.knock(address, keys / "other")
        assert whose_comes_in(inbox) == "other"
        assert inbox.bad_frames.count == 0


def test_a_connection_that_has_ended_by_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end after the thread has looked at it, which no error may end."""
    limits = PeerLimits(zmq.Context.instance())
    limits._peers[1 << 20] = Peer(max_bytes=1000)
    monkeypatch.setattr("runtime.ring.peer_limits._traffic", lambda _: (1 << 20, 2000))
    limits._check(limits._checked_at)
    assert not limits._peers


def test_heartbeats_fill_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand idle clients would have filled what all may after 37 hours."""
    received, ended = 0, list[int]()
    limits = PeerLimits(zmq.Context.instance())
    limits._peers[7] = Peer(max_bytes=1000)
    monkeypatch.setattr("runtime.ring.peer_limits._traffic", lambda _: (1 << 20, received))
    monkeypatch.setattr(limits, "_end", lambda number, _: ended.append(number))
    for _ in range(1000):
        received += 40
        limits._check(limits._checked_at + 5.0)
    assert not ended
    received += 1200
    limits._check(limits._checked_at + 5.0)
    assert ended == [7], "what a message brings fills it all the same"


def test_of_those_who_fill_too_much_together_the_tenant_with_the_most_loses_connections(
    keys: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_small_inbox(keys, monkeypatch) as (gate, inbox, address):
        monkeypatch.setattr(gate.limits, "_max_all_bytes", 8 << 20)
        other = peers.knock(address, keys / "other")
        assert comes_in(inbox, LET_IN_S)
        many = []
        for _ in range(4):
            many.append(peers.knock(address, keys / "client"))
            assert comes_in(inbox, LET_IN_S)
        wait_until(lambda: all(peer.key for peer in gate.limits._peers.values()), LET_IN_S, "all are known")
        other.send(bytes(1_000_000))

        def is_too_much() -> bool:
            for peer in many:
                with suppress(zmq.Again):
                    peer.send(bytes(1_000_000), zmq.NOBLOCK)
            return "without a message" in caplog.text

        wait_until(is_too_much, LET_IN_S, "a connection is closed")
        other.send(FRAME)
        wait_until(
            lambda: "other" in [abort.tenant for abort in inbox.drain()], LET_IN_S, "the other is read"
        )


def test_a_taken_port_is_named(keys: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        tcp = TcpEndpoints("127.0.0.1", taken.getsockname()[1], 1, 1)
        in_use = pytest.raises(AddressInUse, match=rf"zmq_bind.*{tcp.port}.*in use")
        with closing(TcpGate(tcp, keys)) as gate, in_use:
            ZmqInbox(gate.context, tcp.client_out(0), "tokenizer_in", 0, bind=gate.bind)


def test_an_address_of_another_machine_is_named(keys: Path) -> None:
    tcp = TcpEndpoints("192.0.2.1", 5000, 1, 1)
    no_address = pytest.raises(ConfigError, match=r"zmq_bind.*192\.0\.2\.1.*this machine")
    with closing(TcpGate(tcp, keys)) as gate, no_address:
        ZmqInbox(gate.context, tcp.client_out(0), "tokenizer_in", 0, bind=gate.bind)
