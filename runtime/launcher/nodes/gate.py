"""NodeGate: node 0's end of the agents of the other nodes. It takes in who is the same, hears how their ranks
are, tells them what to start and end, and sees when one of them is gone.

An agent that has ended is seen by its connection, since the kernel closes that; one whose machine is gone,
or the way to it, by its silence. Neither comes back as the one it was: it says hello again, with nothing
running.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import zmq

from runtime.base.errors import AddressInUse, ConfigError, ProtocolMismatch
from runtime.launcher.nodes.facts import facts_of, first_difference
from runtime.launcher.nodes.remote_host import HostNews, RemoteHost
from runtime.launcher.nodes.strangers import Strangers
from runtime.ring.node_messages import (
    FromAgent,
    NodeAnswer,
    NodeBeat,
    NodeHello,
    NodeLeft,
    NodePing,
    RankEnded,
    Rejoin,
    StopNode,
    ToAgent,
    decode_first,
    encode_first,
    is_first,
)
from runtime.ring.nodes import NodeKeys, addresses_of
from runtime.ring.process import FIRST_EPOCH
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import MAX_SHORT_CHARS
from runtime.wire.status_page import StatusPage
from runtime.wire.transport import DECODE_ERRORS, BadFrames, MessageCodec, skip_more

logger = logging.getLogger(__name__)

PING_S = 0.2
SILENCE_S = 4.0
"""Seconds of silence after which an agent is given up. It says something every BEAT_S."""
MAX_LOOK_S = 0.5
"""Longest time between two turns that counts: if the launcher itself was held up, nobody else is to blame."""
TAKEN_S = 1.0
"""Seconds after an agent's last word in which it keeps its place when another one wants it."""
MAX_KNOCKS = 3
"""Number of times that another key comes from one address before it counts as that of a node of this launch,
which would be missing. Its agent gives up after as many (`agent_link.MAX_HANDSHAKES`).
"""
GOODBYE_S = 2.0
LINGER_MS = 300
BACKLOG = 128
MAX_FRAME_BYTES = 1 << 20
MAX_DRAIN = 1000


class NodeGate:
    def __init__(
        self, config: RuntimeConfig, page: StatusPage, on_event: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        """Take the ports. `on_event`: called with name and fields of what is worth a line.

        Raises: AddressInUse, ConfigError or ModelError; nothing is left behind then.
        """
        self._page = page
        self._on_event = on_event
        self._facts = facts_of(config)
        self.hosts = {node: RemoteHost(node, self.wait) for node in range(1, config.nnodes)}
        """The other nodes, by their numbers."""
        self.refusal = ""
        """Why a node was not taken in; empty while none was refused for what it is."""
        self.stranger = ""
        """Message about the last one that came with another key; empty while nobody has. It ends no start by
        itself: it may be somebody else's.
        """
        self._news: list[HostNews] = []
        self._is_ending = False
        self._looked_at, self._pinged_at = time.monotonic(), 0.0
        self._codec = MessageCodec(FromAgent, FIRST_EPOCH)
        self._bad_frames = BadFrames("agents")
        addresses, keys = addresses_of(config), NodeKeys.read(config.node_key)
        self.meeting = _listen(addresses.host, addresses.port)
        """Listening socket at which the ranks meet; rank 0 inherits it."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = keys.authenticate(self._context)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        keys.serve(self.socket)
        self._strangers = Strangers(self.socket, addresses.host, addresses.port + 1)
        try:
            self.socket.bind(addresses.agents)
        except zmq.ZMQError as error:
            self.close()
            raise AddressInUse(
                f"dist_addr: cannot listen on {addresses.agents}: {os.strerror(error.errno or 0)}; choose "
                "another port"
            ) from None

    @property
    def missing(self) -> list[str]:
        """Names of the nodes that are not there."""
        return [host.full_name for host in self.hosts.values() if host.peer is None]

    def turn(self) -> None:
        """Hear what has come, tell what is due, see who is silent. Call at least every MAX_LOOK_S."""
        self._receive()
        self._look_for_strangers()
        now = time.monotonic()
        elapsed_s, self._looked_at = min(now - self._looked_at, MAX_LOOK_S), now
        is_due = now - self._pinged_at >= PING_S
        if is_due:
            self._pinged_at = now
        for host in self.hosts.values():
            if host.peer is None:
                continue
            if is_due:
                self._send(host, NodePing())
            while host.orders and host.peer is not None:
                self._send(host, host.orders.popleft())
            host.silent_s += elapsed_s
            if host.peer is not None and host.silent_s >= SILENCE_S:
                self._lose(host, f"has said nothing for {SILENCE_S:g} s")

    def wait(self, timeout_s: float) -> None:
        """Take turns for so long, or until an agent has said something."""
        self.turn()
        self.socket.poll(int(timeout_s * 1000))
        self.turn()

    def take_news(self) -> list[HostNews]:
        """Return what ranks have said, or what there is to be said of them, since the last call."""
        news, self._news = self._news, []
        return news

    def stop(self, reason: str, exit_code: int) -> None:
        """Tell the agents that the launch is over, and wait a moment for them to end."""
        self._is_ending = True
        for host in self.hosts.values():
            host.orders.append(StopNode(reason[:MAX_SHORT_CHARS], exit_code))
        deadline = time.monotonic() + GOODBYE_S
        while len(self.missing) < len(self.hosts) and time.monotonic() < deadline:
            self.wait(PING_S)

    def close(self) -> None:
        """Give up the ports."""
        self.meeting.close()
        self._authenticator.stop()
        self._context.destroy(linger=LINGER_MS)

    # -- what comes ------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(MAX_DRAIN):
            try:
                peer = self.socket.recv(zmq.NOBLOCK)
                frame = self.socket.recv(zmq.NOBLOCK) if self.socket.getsockopt(zmq.RCVMORE) else b""
            except zmq.Again:
                return
            if skip_more(self.socket):
                continue
            try:
                if is_first(frame):
                    self._greet(peer, decode_first(frame, NodeHello))
                else:
                    self._hear(peer, self._codec.decode(frame))
            except (ProtocolMismatch, *DECODE_ERRORS) as error:
                self._bad_frames.add(error)
                if is_first(frame):
                    refusal = (
                        "version: node 0 cannot read this node's first words; install the same on all nodes"
                    )
                    self._send_to(peer, encode_first(NodeAnswer(refusal)))

    def _hear(self, peer: bytes, message: Any) -> None:
        host = next((host for host in self.hosts.values() if host.peer == peer), None)
        if host is None:
            self._send_to(peer, self._codec.encode(Rejoin()))
            return
        host.silent_s = 0.0
        match message:
            case NodeBeat():
                for index, status in host.show(message, time.monotonic_ns()):
                    self._page.write("worker", status, index)
            case RankEnded():
                host.end(message)
            case NodeLeft(reason):
                self._lose(host, f"has left: {reason}")
            case _ if host.is_news(message):
                self._news.append(message)

    def _greet(self, peer: bytes, hello: NodeHello) -> None:
        host = self.hosts.get(hello.node)
        if host is None:
            refusal = f"node_rank: there is no node {hello.node}; the others are 1 to {len(self.hosts)}"
        else:
            refusal = first_difference(self._facts, hello.facts, f"{host.name} ({hello.address})")
            self.refusal = self.refusal or refusal
            refusal = refusal or self._check_place(host)
        if refusal:
            logger.warning("a node is refused: %s", refusal)
            self._on_event("node_refused", node=f"node {hello.node}", reason=refusal)
        if host is None or refusal:
            self._send_to(peer, encode_first(NodeAnswer(refusal)))
            return
        host.join(peer, hello.address)
        self._send_to(peer, encode_first(NodeAnswer()))
        logger.info("%s has joined", host.full_name)
        self._on_event("node_joined", node=host.name, address=hello.address)

    def _look_for_strangers(self) -> None:
        """Say who has come with another key, once for each address."""
        for address in self._strangers.look():
            where = f"a node at {address}" if address else "a node"
            reason = f"node_key: {where} has another key than node 0; give all nodes the same file"
            if reason != self.stranger:
                logger.warning("a node is refused: %s", reason)
                self._on_event("node_refused", node=where, reason=reason)
            self.stranger = reason
            if self._strangers.num_knocks(address) >= MAX_KNOCKS:
                self.refusal = self.refusal or reason

    def _check_place(self, host: RemoteHost) -> str:
        """Say why a node may not take a place; an agent that is gone leaves it."""
        if host.peer is not None:
            self._send(host, NodePing())
        if host.peer is not None and host.silent_s < TAKEN_S:
            return f"node_rank: {host.full_name} is there already"
        if host.peer is not None:
            self._lose(host, "has been replaced")
        return ""

    # -- what goes -------------------------------------------------------------------------------------------

    def _send(self, host: RemoteHost, message: ToAgent) -> None:
        assert host.peer is not None
        if not self._send_to(host.peer, self._codec.encode(message)):
            self._lose(host, "is gone: its agent has ended")

    def _send_to(self, peer: bytes, frame: bytes) -> bool:
        """False: nobody is there, or nothing goes out any more."""
        try:
            self.socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        return True

    def _lose(self, host: RemoteHost, reason: str) -> None:
        if not self._is_ending:
            logger.warning("%s %s", host.full_name, reason)
        self._on_event("node_lost", node=host.name, reason=reason)
        self._news += host.lose(reason)


def _listen(host: str, port: int) -> socket.socket:
    """Raises AddressInUse or ConfigError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"dist_addr: {host} is no address of this machine, which is node 0") from None
        raise AddressInUse(
            f"dist_addr: cannot listen on {host}:{port}: {error.strerror}; choose another port"
        ) from None
    return listener
