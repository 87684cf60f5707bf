"""NodeGate: node 0's side of the connections to the agents of other nodes. It admits nodes whose facts are
equal, receives reports about their ranks, sends orders, and notices when a node is gone.

The end of an agent is noticed by its connection, which the kernel closes. A lost machine or network is
noticed by silence. A node never resumes: it joins again with nothing running.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from runtime.base.errors import AddressInUse, ConfigError, ProtocolMismatch
from runtime.launcher.nodes.facts import facts_of, first_difference
from runtime.launcher.nodes.remote_host import HostNews, RemoteHost
from runtime.launcher.nodes.strangers import Strangers
from runtime.ring.launch_state import write_atomically
from runtime.ring.node_messages import (
    LINGER_MS,
    MAX_FRAME_BYTES,
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
"""Seconds of silence after which an agent is given up. Agents send something every BEAT_S."""
MAX_LOOK_S = 0.5
"""Maximum time between two turns that counts as silence of an agent. A longer gap means that this launcher
was delayed.
"""
TAKEN_S = 1.0
"""Seconds after an agent's last message during which another agent cannot take its place."""
MAX_KNOCKS = 3
"""Number of attempts with a wrong key from one address after which they are assumed to come from a missing
node of this launch. Its agent gives up after as many (`agent_link.MAX_HANDSHAKES`).
"""
GOODBYE_S = 2.0
BACKLOG = 128
MAX_DRAIN = 1000


class NodeGate:
    def __init__(
        self, config: RuntimeConfig, page: StatusPage, on_event: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        """Bind the ports. on_event: called with the name and fields of events to be logged. Raises
        AddressInUse, ConfigError or ModelError, with nothing left behind.
        """
        self._page = page
        self._on_event = on_event
        self._own_address, self._start_timeout_s = config.node_addr, config.start_timeout
        self._facts = facts_of(config)
        self.hosts = {node: RemoteHost(node, self.wait) for node in range(1, config.nnodes)}
        """The other nodes by number."""
        self.refusal = ""
        """Reason why a node was refused for its facts or its key; empty if none was."""
        self.stranger = ""
        """Message about the last connection with a wrong key; empty if there was none. It does not end the
        start, because it may be somebody else's.
        """
        self._news: list[HostNews] = []
        self._is_ending = False
        self._looked_at, self._pinged_at = time.monotonic(), 0.0
        self._codec = MessageCodec(FromAgent, FIRST_EPOCH)
        self._bad_frames = BadFrames("agents")
        addresses, keys = addresses_of(config), NodeKeys.read(config.node_key)
        self.meeting = _listen(addresses.host, addresses.port)
        """Listening socket through which the ranks meet. Rank 0 inherits it."""
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
        """Names of the nodes that have not joined."""
        return [host.full_name for host in self.hosts.values() if host.peer is None]

    @property
    def absence(self) -> str:
        """Error of a launch for which nodes are missing after the start timeout."""
        absence = f"{', '.join(self.missing)}: not there within {self._start_timeout_s:g} s"
        return f"{absence}; {self.stranger}" if self.stranger else absence

    def write_addresses(self, path: Path) -> None:
        """Write the addresses of all nodes, for the scheduler that is started next. Raises OSError."""
        addresses = [self._own_address, *(host.address for host in self.hosts.values())]
        write_atomically(path, "\n".join(addresses).encode())

    def turn(self) -> None:
        """Receive messages, send orders that are due, and check for silent agents. Call it at least every
        MAX_LOOK_S.
        """
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
        """Take turns for timeout_s, or until an agent has sent something."""
        self.turn()
        self.socket.poll(int(timeout_s * 1000))
        self.turn()

    def take_news(self) -> list[HostNews]:
        """Return and clear the messages of ranks, and about ranks, since the last call."""
        news, self._news = self._news, []
        return news

    def stop(self, reason: str, exit_code: int) -> None:
        """Tell the agents that the launch is over, and wait briefly for them to end."""
        self._is_ending = True
        for host in self.hosts.values():
            host.orders.append(StopNode(reason[:MAX_SHORT_CHARS], exit_code))
        deadline = time.monotonic() + GOODBYE_S
        while len(self.missing) < len(self.hosts) and time.monotonic() < deadline:
            self.wait(PING_S)

    def close(self) -> None:
        """Close the ports."""
        self.meeting.close()
        self._authenticator.stop()
        self._context.destroy(linger=LINGER_MS)

    # -- messages of agents ----------------------------------------------------------------------------------

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
        """Log each address from which a wrong key was used, once."""
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
        """Return why a node may not take a place; empty if it may. An agent that is gone gives up
        its place.
        """
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
        """Send a frame. Returns False if no agent is connected or the queue is full."""
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
    """Listen at an address. Raises AddressInUse or ConfigError."""
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
