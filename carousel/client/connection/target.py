"""Target: addresses of a runtime's sockets, and how a client sees that it is alive. There are two kinds: the
run directory of a launch on this machine, and a TCP address. The target is the one that is named, or that of
the environment, or else the only live launch.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from carousel.client.connection.ring_watch import PageWatch, RemoteWatch, RingWatch
from runtime.base.environment import default_run_root, environment_run_dir
from runtime.base.errors import ConfigError, RingClosed
from runtime.ring.endpoints import MAX_PORT, TCP_SCHEME, Endpoints, TcpEndpoints
from runtime.ring.keys import CLIENT, ClientKeys
from runtime.ring.launch_state import read_zmq_bind
from runtime.ring.run_dir import check_run_dir, live_run_dirs
from runtime.wire.transport import MAX_FRAME_BYTES, MAX_TCP_FRAME_BYTES


class Target(Protocol):
    name: str
    """Name of the runtime, for messages to users."""
    wants_status: bool
    """True if the server must send RingStatus messages."""
    no_answer_hint: str
    """Likely reason if there is no answer, for errors."""
    run_dir: Path | None
    """Run directory of the runtime; None over TCP."""
    max_frame_bytes: int
    """Maximum number of bytes of a request that the server's sockets accept."""

    def client_out(self, index: int) -> str:
        """Return the address of a detokenizer."""

    def tokenizer_in(self, index: int, num_detokenizers: int) -> str:
        """Return the address of a tokenizer."""

    def prepare(self, socket: zmq.Socket[Any]) -> None:
        """Configure a socket before it connects."""

    def open_watch(self) -> RingWatch:
        """Return a watch on the runtime. Raises RingClosed if it is known at once that there is none."""


class RunDirTarget:
    wants_status = False
    max_frame_bytes = MAX_FRAME_BYTES
    no_answer_hint = "it may still be loading its model"

    def __init__(self, run_dir: Path) -> None:
        """Use a run directory. Raises ConfigError for one that another user may have made."""
        check_run_dir(run_dir)
        self.run_dir: Path | None = run_dir
        self.name = str(run_dir)
        self._endpoints = Endpoints(run_dir)

    def client_out(self, index: int) -> str:
        return self._endpoints.client_out(index)

    def tokenizer_in(self, index: int, num_detokenizers: int) -> str:
        return self._endpoints.tokenizer_in(index)

    def prepare(self, socket: zmq.Socket[Any]) -> None:
        """Do nothing: only this user can connect at all."""

    def open_watch(self) -> RingWatch:
        watch = PageWatch(self._endpoints)
        node = _node_of(self._endpoints)
        if node.node_rank:
            watch.close()
            raise ConfigError(
                f"run_dir: {self.name} is that of node {node.node_rank}, which has ranks and takes no "
                f"requests; they go to node 0, at {node.dist_addr.rpartition(':')[0]}"
            )
        return watch


class TcpTarget:
    """A runtime that is reached through TCP, on this machine or another."""

    wants_status = True
    run_dir: Path | None = None
    max_frame_bytes = MAX_TCP_FRAME_BYTES
    no_answer_hint = "it may not be there, may still be loading its model, or may not know the client's key"

    def __init__(self, address: str, curve_dir: Path | None = None) -> None:
        """Read the keys `client.key_secret` and `server.key` in `curve_dir`; without it, for an address of
        this machine, those of this user's launch that is served there. Raises ConfigError for an address or a
        key file that is wrong, missing or not to be found.
        """
        self.name = address
        self._host, self._port = _split_address(address)
        self._keys = ClientKeys.read(curve_dir or self._own_keys())

    def client_out(self, index: int) -> str:
        return self._endpoints(index + 1).client_out(index)

    def tokenizer_in(self, index: int, num_detokenizers: int) -> str:
        return self._endpoints(num_detokenizers).tokenizer_in(index)

    def _endpoints(self, num_detokenizers: int) -> TcpEndpoints:
        return TcpEndpoints(self._host, self._port, 1, num_detokenizers)

    def prepare(self, socket: zmq.Socket[Any]) -> None:
        socket.setsockopt(zmq.IPV6, 1 if self._host.startswith("[") else 0)
        socket.curve_publickey = self._keys.public
        socket.curve_secretkey = self._keys.secret
        socket.curve_serverkey = self._keys.server

    def open_watch(self) -> RingWatch:
        return RemoteWatch()

    def _own_keys(self) -> Path:
        """Return the directory of the keys that a launch of this user has made for its clients. Raises
        ConfigError.
        """
        if not _is_loopback(self._host):
            raise ConfigError(f"curve_dir: needed for {self.name}; it holds this client's keys")
        found = _keys_of_own_launch(self._port)
        if found is None:
            raise ConfigError(
                f"curve_dir: no launch of this user that made its own keys is served at {self.name}; name "
                "the directory of this client's keys (for a launch with --run-dir DIR it is DIR/keys/client)"
            )
        return found


def find_target(where: str | Path | None = None, curve_dir: str | Path | None = None) -> Target:
    """Return the runtime to connect to: a run directory, or an address tcp://HOST:PORT with the keys in
    `curve_dir`. Raises RingClosed when no launch is alive, ConfigError, which lists the candidates, when
    there are several, and for a wrong address or key.
    """
    return make_target(where or environment_run_dir() or find_run_dir(), curve_dir)


def find_run_dir(run_dir: str | Path | None = None) -> Path:
    """Return the run directory to connect to. Raises RingClosed when no launch is alive, ConfigError, which
    lists the candidates, when there are several.
    """
    named = str(run_dir or environment_run_dir())
    if named:
        return Path(named).absolute()
    candidates = [path for path in live_run_dirs() if _takes_requests(Endpoints(path))]
    if not candidates:
        raise RingClosed(
            f"no runtime is alive under {default_run_root()}; "
            "start one with launch.py, or name its directory with run_dir"
        )
    if len(candidates) > 1:
        known = ", ".join(str(path) for path in candidates)
        raise ConfigError(
            f"run_dir: several runtimes are alive, name one of them (or set CAROUSEL_RUN_DIR): {known}"
        )
    return candidates[0]


def make_target(where: str | Path, curve_dir: str | Path | None = None) -> Target:
    """Return the target for a run directory or tcp://HOST:PORT. Raises ConfigError."""
    if isinstance(where, str) and where.startswith(TCP_SCHEME):
        return TcpTarget(where, None if curve_dir is None else Path(curve_dir))
    if curve_dir is not None:
        raise ConfigError("curve_dir: keys are for an address tcp://HOST:PORT; a run directory needs none")
    if "://" in str(where):
        raise ConfigError(f"run_dir: {where} is neither a run directory nor an address tcp://HOST:PORT")
    return RunDirTarget(Path(where).absolute())


def _split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix(TCP_SCHEME).rpartition(":")
    is_number = port.isascii() and port.isdecimal()
    if not host or not colon or "/" in host or not is_number or not 1 <= int(port) <= MAX_PORT:
        raise ConfigError(f"run_dir: {address} is no address; write tcp://HOST:PORT")
    return host, int(port)


def _keys_of_own_launch(port: int) -> Path | None:
    named = environment_run_dir()
    for run_dir in [*([Path(named)] if named else []), *live_run_dirs()]:
        endpoints = Endpoints(run_dir)
        keys = endpoints.keys_dir / CLIENT
        try:
            zmq_bind = read_zmq_bind(endpoints.state_file)
        except (OSError, msgspec.MsgspecError):
            continue  # it has ended, or is not ready yet
        if zmq_bind.endswith(f":{port}") and keys.is_dir():
            return keys
    return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


class _NodeOfLaunch(msgspec.Struct):
    """Settings of a launch that are read here."""

    node_rank: int = 0
    dist_addr: str = ""


class _Launch(msgspec.Struct):
    config: _NodeOfLaunch


def _node_of(endpoints: Endpoints) -> _NodeOfLaunch:
    """Return which node of a launch over several machines this one is, with the address of node 0."""
    try:
        return msgspec.json.decode(endpoints.config_file.read_bytes(), type=_Launch).config
    except (OSError, msgspec.MsgspecError):  # it has ended, is not ready yet, or has another version
        return _NodeOfLaunch()


def _takes_requests(endpoints: Endpoints) -> bool:
    """Return True if a launch has started, and is not a node that only has ranks."""
    return endpoints.state_file.exists() and not _node_of(endpoints).node_rank
