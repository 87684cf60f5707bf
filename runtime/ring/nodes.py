"""Addresses and keys of a launch over several machines.

    PORT                of --dist-addr, on node 0: where the ranks meet (torch's TCPStore)
    PORT + 1            on node 0: its launcher, for the agents of the other nodes
    PORT + 2            on node 0: its scheduler, for the answers of ranks on other nodes
    PORT + 2 + rank     on the node of each rank that is not on node 0: its plans

All but the first use ZMQ with CURVE. All keys are derived from one secret, which every node has in a file;
whoever has it is trusted. The first port, and the traffic among ranks, is not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from runtime.base.environment import default_run_root
from runtime.base.errors import ConfigError
from runtime.base.ownership import fault_of
from runtime.ring.process import ProcessContext
from runtime.settings.config import RuntimeConfig
from runtime.wire.transport import ZmqInbox, ZmqOutbox

SECRET_BYTES = 32
MIN_SECRET_CHARS = 32
DOMAIN = "carousel-nodes"
OWN_SECRET = "nodes.key"
HANDSHAKE_MS = 2000
SHUTDOWN_LINGER_MS = 200
# A machine that is gone sends nothing. The kernel gives the connection up after these times.
KEEPALIVE_S = 2
MAX_UNACKNOWLEDGED_MS = 15_000


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """Addresses at which the machines of a launch connect."""

    host: str
    """IPv4 address of node 0."""
    port: int

    @property
    def agents(self) -> str:
        """Address at which node 0's launcher listens for agents."""
        return f"tcp://{self.host}:{self.port + 1}"

    @property
    def answers(self) -> str:
        """Address at which node 0's scheduler listens for ranks of other nodes. It uses the number of rank 0,
        which is on node 0 and needs none.
        """
        return f"tcp://{self.host}:{self.port + 2}"

    def rank_in(self, host: str, rank: int) -> str:
        """Return the address at which a rank on `host` receives its plans."""
        return f"tcp://{host}:{self.port + 2 + rank}"


def addresses_of(config: RuntimeConfig) -> NodeAddresses:
    """Return the addresses of resolved settings."""
    host, _, port = config.dist_addr.rpartition(":")
    return NodeAddresses(host, int(port))


class NodeKeys:
    """CURVE key pairs of both sides, derived from the nodes' secret."""

    def __init__(self, secret: bytes) -> None:
        self.server_public, self._server_secret = _pair(secret, b"server")
        self.client_public, self._client_secret = _pair(secret, b"client")

    @staticmethod
    def read(path: str) -> NodeKeys:
        """Derive the keys from the secret in a file; if none is named, from this user's own. Raises
        ConfigError.
        """
        return NodeKeys(_read_secret(Path(path)) if path else _own_secret())

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if the public key (Z85) may connect. Called by the authenticator, in its thread."""
        return key == self.client_public

    def authenticate(self, context: zmq.Context[Any]) -> Any:
        """Start the thread that rejects other keys on the sockets of `context`. Returns an object to
        stop it.
        """
        # Imported here, because it brings asyncio and most launches have no nodes.
        from zmq.auth.thread import ThreadAuthenticator

        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        return authenticator

    def serve(self, socket: zmq.Socket[Any]) -> None:
        """Configure a socket as a server. Its context must be authenticated."""
        _tune(socket)
        socket.curve_server = True
        socket.curve_publickey = self.server_public
        socket.curve_secretkey = self._server_secret
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        # Without this setting, a context without an authenticator accepts every peer.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """Configure a socket as a client."""
        _tune(socket)
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self._client_secret


def open_rank_inbox(context: ProcessContext, rank: int) -> ZmqInbox:
    """Bind the socket at which this rank receives its plans. Raises ConfigError."""
    config = context.config
    if not config.node_rank:
        return context.inbox("rank_in", context.endpoints.rank_in(rank))
    keys = NodeKeys.read(config.node_key)
    keys.authenticate(context.zmq)
    address = addresses_of(config).rank_in(config.node_addr, rank)
    return ZmqInbox(context.zmq, address, "rank_in", context.epoch, bind=_binder(keys))


def open_rank_outbox(context: ProcessContext, rank: int) -> ZmqOutbox:
    """On node 0, connect to the socket at which a rank receives its plans. Raises ConfigError."""
    config = context.config
    node = config.node_of_rank(rank)
    if not node:
        address = context.endpoints.rank_in(rank)
        return ZmqOutbox(context.zmq, address, context.epoch, linger_ms=SHUTDOWN_LINGER_MS)
    keys = NodeKeys.read(config.node_key)
    host = read_node_addresses(context)[node]
    return ZmqOutbox(
        context.zmq,
        addresses_of(config).rank_in(host, rank),
        context.epoch,
        linger_ms=SHUTDOWN_LINGER_MS,
        prepare=keys.connect,
    )


def open_answers_inbox(context: ProcessContext) -> ZmqInbox | None:
    """On node 0, bind the socket for answers of ranks on other nodes; None if there are none. Raises
    ConfigError.
    """
    config = context.config
    if config.nnodes == 1:
        return None
    keys = NodeKeys.read(config.node_key)
    keys.authenticate(context.zmq)
    address = addresses_of(config).answers
    return ZmqInbox(context.zmq, address, "step_results", context.epoch, bind=_binder(keys))


def open_rank_answers(context: ProcessContext) -> ZmqOutbox:
    """Connect to the socket for the answers of this node's rank. Raises ConfigError."""
    config = context.config
    if not config.node_rank:
        return context.outbox(context.endpoints.step_results)
    keys = NodeKeys.read(config.node_key)
    address = addresses_of(config).answers
    return ZmqOutbox(context.zmq, address, context.epoch, linger_ms=SHUTDOWN_LINGER_MS, prepare=keys.connect)


def read_node_addresses(context: ProcessContext) -> list[str]:
    """Return the nodes' addresses, which the launcher wrote into the run directory before it started any
    process.
    """
    return context.endpoints.nodes_file.read_text().split()


def _binder(keys: NodeKeys) -> Callable[[zmq.Socket[Any], str], None]:
    def bind(socket: zmq.Socket[Any], address: str) -> None:
        keys.serve(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"dist_addr: cannot listen on {address}: {error.strerror}") from None

    return bind


def _tune(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 5)
    socket.setsockopt(zmq.TCP_MAXRT, MAX_UNACKNOWLEDGED_MS)


def _pair(secret: bytes, name: bytes) -> tuple[bytes, bytes]:
    """Return the (public, secret) key pair of one side, in Z85."""
    own = z85.encode(hashlib.blake2b(secret, digest_size=32, person=name).digest())
    return zmq.curve_public(own), own


def _read_secret(path: Path) -> bytes:
    try:
        fault = fault_of(path, is_secret=True)
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"node_key: {path} cannot be read: {error.strerror}") from None
    if fault is not None:
        raise ConfigError(f"node_key: {fault}")
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"node_key: {path} holds {len(secret)} characters, too few for a secret; `openssl rand -hex 32` "
            "makes one"
        )
    return secret


def _own_secret() -> bytes:
    """Return the secret that this user's launches on one machine share; the first launch makes it. Raises
    ConfigError.
    """
    root = default_run_root()
    path, new = root / OWN_SECRET, root / f".{OWN_SECRET}-{os.getpid()}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = fault_of(root)
        if fault is None and not path.exists():
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.urandom(SECRET_BYTES).hex().encode())
            with contextlib.suppress(FileExistsError):
                os.link(new, path)  # the second process uses the file of the first
            new.unlink()
    except OSError as error:
        fault = str(error)
    if fault is not None:
        raise ConfigError(f"node_key: {fault}; name a file of your own")
    return _read_secret(path)
