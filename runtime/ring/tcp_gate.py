"""TcpGate: the way in over TCP. Owns the sockets that other machines reach, apart from those of the ring.

They have a ZMQ context of their own, so what strangers do keeps no thread of the ring's own sockets busy.
A peer without one of the keys that may connect gets no further than the handshake: nothing it sends reaches a
socket. That holds on loopback too, where every user and every web page that a browser shows can reach a port
and ZMQ's oldest framing fits behind the head of an HTTP request. Knows no message.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import zmq

from runtime.base.errors import AddressInUse, ConfigError
from runtime.ring.endpoints import Endpoints, TcpEndpoints
from runtime.ring.keys import ServerKeys
from runtime.settings.config import RuntimeConfig
from runtime.wire.transport import MAX_TCP_FRAME_BYTES, ZmqInbox

DOMAIN = "carousel"
BACKLOG = 1024
# A peer that connects and then says nothing is dropped after this time.
HANDSHAKE_MS = 5000
# One that has vanished without a word is noticed by these, as the silence of a client is.
HEARTBEAT_MS = 5000
HEARTBEAT_TIMEOUT_MS = 15000
LINGER_MS = 100
# Messages of one peer that ZMQ holds: with one on its way, 5 times the longest.
MAX_UNREAD = 4


class TcpGate:
    def __init__(self, endpoints: TcpEndpoints, curve_dir: Path) -> None:
        """Read the keys in `curve_dir`. Raises ConfigError."""
        # Imported here, because it brings asyncio and most launches have no gate.
        from zmq.auth.thread import ThreadAuthenticator

        self.endpoints = endpoints
        self.context: zmq.Context[Any] = zmq.Context()
        self._keys = ServerKeys.read(curve_dir)
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain=DOMAIN, location=str(self._keys.clients))

    @staticmethod
    def open(config: RuntimeConfig, endpoints: Endpoints) -> TcpGate | None:
        """Return the gate that the settings ask for, None where they ask for none. Its keys are those of
        `curve_dir`, else those that the launcher has made in its run directory. Raises ConfigError.
        """
        if config.tcp is None:
            return None
        return TcpGate(config.tcp, Path(config.curve_dir) if config.curve_dir else endpoints.keys_dir)

    def inbox(self, address: str, name: str, epoch: int) -> ZmqInbox:
        """Open the inbox `name` at `address`, with bounds on what a peer can fill. Raises AddressInUse."""
        return ZmqInbox(
            self.context,
            address,
            name,
            epoch,
            bind=self.bind,
            max_frame_bytes=MAX_TCP_FRAME_BYTES,
            max_unread=MAX_UNREAD,
        )

    def bind(self, socket: zmq.Socket[Any], address: str) -> None:
        """Set what a socket of `context` needs before strangers may reach it, then bind it.

        Raises: AddressInUse that names the address.
        """
        socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.curve_server = True
        socket.curve_publickey = self._keys.public
        socket.curve_secretkey = self._keys.secret
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        # Without it, a context in which nobody authenticates lets everybody in.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            number = error.errno or 0
            if number in (errno.ENODEV, errno.EADDRNOTAVAIL):
                raise ConfigError(f"zmq_bind: {address} is no address of this machine") from None
            raise AddressInUse(
                f"zmq_bind: cannot listen on {address}: {os.strerror(number)}; choose other ports"
            ) from None

    def close(self) -> None:
        """Close the sockets; what they still hold has a moment to go out."""
        self._authenticator.stop()
        self.context.destroy(linger=LINGER_MS)
