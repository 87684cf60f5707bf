"""TcpGate: access to the ring over TCP. It owns the sockets that other machines can reach.

These sockets have a ZMQ context of their own, so strangers cannot keep the threads of the ring's own sockets
busy. A peer without an accepted key gets no further than the handshake, and nothing that it sends reaches a
socket. That holds on loopback, too, where every user and every web page in a browser can reach a port, and
where ZMQ's oldest framing would fit behind the head of an HTTP request. A key belongs to a tenant: ZMQ
attaches the sender's proven key to each message, and the gate knows its tenant. Knows no message.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from runtime.base.errors import AddressInUse, ConfigError
from runtime.ring.endpoints import Endpoints, TcpEndpoints, tcp_endpoints
from runtime.ring.keys import ServerKeys
from runtime.ring.peer_limits import PeerLimits
from runtime.ring.tenants import OWNER
from runtime.settings.config import RuntimeConfig
from runtime.wire.transport import MAX_TCP_FRAME_BYTES, StampMessage, ZmqInbox

logger = logging.getLogger(__name__)

DOMAIN = "carousel"
BACKLOG = 1024
# Time after which a peer that connects and then sends nothing is dropped.
HANDSHAKE_MS = 5000
# These notice a peer that has vanished, as the silence of a client is noticed.
HEARTBEAT_MS = 5000
HEARTBEAT_TIMEOUT_MS = 15000
LINGER_MS = 100
# Messages of one peer that ZMQ holds: with the one on its way, 5 times the longest.
MAX_UNREAD = 4


class TcpGate:
    def __init__(self, endpoints: TcpEndpoints, curve_dir: Path, *, is_own: bool = False) -> None:
        """Read the keys in `curve_dir`. is_own: they belong to this user, whatever their names. Raises
        ConfigError.
        """
        # Imported here, because it brings asyncio and most launches have no gate.
        from zmq.auth.thread import ThreadAuthenticator

        self.endpoints = endpoints
        self.context: zmq.Context[Any] = zmq.Context()
        self._curve_dir = curve_dir
        self._is_own = is_own
        self._keys = ServerKeys.read(curve_dir)
        self._tenants = self._tenants_of(self._keys)
        self.limits = PeerLimits(self.context)
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)

    @staticmethod
    def open(config: RuntimeConfig, endpoints: Endpoints) -> TcpGate | None:
        """Return the gate that the settings ask for, or None. Its keys are those of `curve_dir`, or else
        those that the launcher has made in its run directory. Raises ConfigError.
        """
        tcp = tcp_endpoints(config)
        if tcp is None:
            return None
        if config.curve_dir:
            return TcpGate(tcp, Path(config.curve_dir))
        return TcpGate(tcp, endpoints.keys_dir, is_own=True)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if the public key (Z85) may connect. Called by the authenticator, in its thread."""
        return key.decode() in self._tenants

    def tenant_of(self, key: str) -> str:
        """Return the tenant of a public key (Z85). Raises ValueError if it is not accepted, or no longer."""
        tenant = self._tenants.get(key)
        if tenant is None:
            raise ValueError("the key that it came with may not connect")
        return tenant

    def reload(self) -> None:
        """Read the clients' keys again in a thread, so that a disk which hangs delays nothing. If they are
        faulty nothing changes. A key that was removed is no longer accepted, even on open connections.
        """
        threading.Thread(target=self._read_tenants, name="carousel-keys", daemon=True).start()

    def _read_tenants(self) -> None:
        try:
            self._tenants = self._tenants_of(ServerKeys.read(self._curve_dir))
        except ConfigError as error:
            logger.warning("the keys stay as they were: %s", error)

    def _tenants_of(self, keys: ServerKeys) -> Mapping[str, str]:
        return {key.decode(): OWNER if self._is_own else name for key, name in keys.clients.items()}

    def inbox(self, address: str, name: str, epoch: int, stamp: StampMessage) -> ZmqInbox:
        """Open the inbox `name` at `address`, with bounds on what a peer can fill. Raises AddressInUse."""
        return ZmqInbox(
            self.context,
            address,
            name,
            epoch,
            bind=self.bind,
            max_frame_bytes=MAX_TCP_FRAME_BYTES,
            max_unread=MAX_UNREAD,
            stamp=stamp,
            note_read=self.limits.note_read,
        )

    def bind(self, socket: zmq.Socket[Any], address: str) -> None:
        """Configure a socket of `context` for access by strangers, then bind it. Raises AddressInUse, which
        names the address.
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
        # Without this setting, a context without an authenticator accepts every peer.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.limits.watch(socket)
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
        """Close the sockets. Pending messages get a moment to be sent."""
        self._authenticator.stop()
        self.limits.close()
        self.context.destroy(linger=LINGER_MS)
