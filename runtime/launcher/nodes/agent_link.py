"""AgentLink: the agent's side of its connection to node 0's launcher."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

import zmq

from runtime.base.errors import EXIT_INTERNAL, ConfigError, ProtocolMismatch, StartError
from runtime.launcher.nodes.facts import facts_of
from runtime.launcher.nodes.strangers import FAILURES
from runtime.ring.node_messages import (
    LINGER_MS,
    MAX_FRAME_BYTES,
    FromAgent,
    NodeAnswer,
    NodeHello,
    Rejoin,
    ToAgent,
    decode_first,
    encode_first,
    is_first,
)
from runtime.ring.nodes import NodeKeys, addresses_of
from runtime.ring.process import FIRST_EPOCH
from runtime.settings.config import RuntimeConfig
from runtime.wire.transport import DECODE_ERRORS, BadFrames, MessageCodec, skip_more

RECONNECT_MS = 200
MAX_HANDSHAKES = 3
"""Number of consecutive handshakes that node 0 breaks off, after which the keys are assumed to differ."""
BREAK_S = 1.0
"""Maximum number of seconds between a connection and its break that still mean a deliberate refusal by node
0. If node 0 is stopped or gets no CPU time, this side gives up after HANDSHAKE_MS.
"""
PROBE_S = 0.5
PROBE_TIMEOUT_S = 0.3
GONE_S = 1.5
"""Seconds without a listener at node 0's port, after there was one, after which node 0 counts as ended."""


class NodeZeroGone(StartError):
    """Node 0 has ended without a message, or was never reachable."""

    exit_code = EXIT_INTERNAL


class AgentLink:
    def __init__(self, config: RuntimeConfig) -> None:
        """Connect to node 0's launcher. Raises ConfigError or ModelError."""
        self._config = config
        self._addresses = addresses_of(config)
        self._keys = NodeKeys.read(config.node_key)
        self._hello = encode_first(NodeHello(config.node_rank, config.node_addr, facts_of(config)))
        self._codec = MessageCodec(ToAgent, FIRST_EPOCH)
        self._bad_frames = BadFrames("node 0")
        self._context: zmq.Context[Any] = zmq.Context()
        self.is_joined = False
        """True while node 0 has accepted this node on the current connection."""
        self._was_joined = False
        self._apart_since = time.monotonic()
        self._refused_since: float | None = None
        self._probed_at = 0.0
        self._connect()

    @property
    def socket(self) -> zmq.Socket[Any]:
        """Socket to poll. It changes after each Rejoin."""
        socket: zmq.Socket[Any] = self._socket
        return socket

    def turn(self) -> list[ToAgent]:
        """Return the messages of node 0; Rejoin if the connection is lost, after which nothing may run here.
        Raises ConfigError if node 0 refuses this node, NodeZeroGone if it cannot be reached.
        """
        orders = self._receive()
        if self._has_lost_connection() or any(isinstance(order, Rejoin) for order in orders):
            self._leave()
            self._connect()
            return [Rejoin()]
        if not self.is_joined:
            self._check_node_zero()
        return orders

    def send(self, message: FromAgent) -> None:
        """Send a message to node 0, unless this node is not joined at the moment."""
        if self.is_joined:
            self._send(self._codec.encode(message))

    def close(self) -> None:
        """Close the connection, after the last messages are sent."""
        self._context.destroy(linger=LINGER_MS)

    def _connect(self) -> None:
        self._num_failed = 0
        self._connected_at = 0.0
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._keys.connect(self._socket)
        self._monitor = self._socket.get_monitor_socket()
        self._socket.connect(self._addresses.agents)
        self._send(self._hello)

    def _leave(self) -> None:
        if self.is_joined:
            self._apart_since = time.monotonic()
        self.is_joined = False
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _send(self, frame: bytes) -> None:
        # If there is no room, node 0 has not read for minutes, and has given this node up.
        with suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)

    def _receive(self) -> list[ToAgent]:
        orders: list[ToAgent] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return orders
            if skip_more(self._socket):
                continue
            try:
                if is_first(frame):
                    self._take_answer(decode_first(frame, NodeAnswer))
                elif self.is_joined:
                    orders.append(self._codec.decode(frame))
            except (ProtocolMismatch, *DECODE_ERRORS) as error:
                self._bad_frames.add(error)

    def _take_answer(self, answer: NodeAnswer) -> None:
        if answer.refusal:
            raise ConfigError(answer.refusal)
        self.is_joined = self._was_joined = True
        self._refused_since = None

    def _has_lost_connection(self) -> bool:
        # Imported here, because it would bring zmq's asyncio parts into the launcher.
        from zmq.utils.monitor import recv_monitor_message

        lost = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                self._connected_at = time.monotonic()
            elif event in FAILURES:
                self._num_failed += time.monotonic() - self._connected_at < BREAK_S
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_failed = 0
            elif event == zmq.EVENT_DISCONNECTED:
                lost = lost or self.is_joined
        if self._num_failed >= MAX_HANDSHAKES:
            raise self._key_error()
        return lost

    def _key_error(self) -> ConfigError:
        return ConfigError(
            f"node_key: {self._addresses.agents} does not take this node's key; give all nodes the same file"
        )

    def _check_node_zero(self) -> None:
        """Raise NodeZeroGone, or ConfigError if node 0 ended because of this node's key."""
        now = time.monotonic()
        if now - self._apart_since > self._config.start_timeout:
            raise NodeZeroGone(
                f"dist_addr: node 0 has not answered at {self._addresses.agents} for "
                f"{self._config.start_timeout:g} s"
            )
        is_known = self._was_joined or self._num_failed > 0
        if is_known and now - self._probed_at > PROBE_S:
            self._probed_at = now
            if not self._is_refused():
                self._refused_since = None
            elif self._refused_since is None:
                self._refused_since = now
            elif now - self._refused_since > GONE_S:
                if not self._was_joined:
                    raise self._key_error()
                raise NodeZeroGone(f"node 0 at {self._addresses.host} has ended")

    def _is_refused(self) -> bool:
        """Return True if node 0's machine answers but nothing listens at the port."""
        try:
            with socket.create_connection((self._addresses.host, self._addresses.port + 1), PROBE_TIMEOUT_S):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
