"""Endpoints: every name inside a run directory, and every TCP port. Each launch has a private directory, so
nothing is shared by name.

A run directory has mode 0700 and is held by a lock for as long as its launch lives; one whose lock is free is
a leftover and the next launch removes it.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from runtime.base.errors import ConfigError
from runtime.settings.config import RuntimeConfig

TCP_SCHEME = "tcp://"
ANY_HOST = "*"
MAX_PORT = 65535
# sun_path of a unix socket holds 108 bytes; the longest name below is 16.
MAX_RUN_DIR_BYTES = 90


@dataclass(frozen=True, slots=True)
class Endpoints:
    run_dir: Path

    def __post_init__(self) -> None:
        if len(os.fsencode(self.run_dir)) > MAX_RUN_DIR_BYTES:
            raise ConfigError(
                f"run_dir: {self.run_dir} is longer than {MAX_RUN_DIR_BYTES} bytes, too long for unix sockets"
            )

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir / name}"

    def tokenizer_in(self, index: int = 0) -> str:
        """Return the address of a tokenizer. A request goes to number `seq` mod their number, and so does its
        abort.
        """
        return self._ipc(f"tokenizer_in{index}")

    @property
    def scheduler_in(self) -> str:
        return self._ipc("scheduler_in")

    @property
    def grammar_in(self) -> str:
        return self._ipc("grammar_in")

    @property
    def grammar_out(self) -> str:
        """Address at which the grammar process answers. The scheduler binds it, which waits for masks in the
        middle of a turn.
        """
        return self._ipc("grammar_out")

    def detokenizer_in(self, index: int = 0) -> str:
        """Return the address of a detokenizer. A sequence belongs to number `client` mod their number: each
        draws the ids of its clients so.
        """
        return self._ipc(f"detokenizer_in{index}")

    def client_out(self, index: int = 0) -> str:
        return self._ipc(f"client_out{index}")

    def api_orders(self, index: int) -> Path:
        """The socket on which an HTTP process hears of what was said to another one."""
        return self.run_dir / f"api_orders{index}"

    @property
    def step_results(self) -> str:
        return self._ipc("step_results")

    @property
    def launcher_in(self) -> str:
        return self._ipc("launcher_in")

    def rank_in(self, rank: int) -> str:
        return self._ipc(f"rank_in{rank}")

    def ranks_dir(self, epoch: int) -> Path:
        """Directory in which ranks of a model that were started together find each other."""
        return self.run_dir / f"ranks{epoch}"

    @property
    def config_file(self) -> Path:
        return self.run_dir / "config.json"

    @property
    def state_file(self) -> Path:
        return self.run_dir / "state.json"

    @property
    def status_file(self) -> Path:
        return self.run_dir / "status"

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer as its first process has loaded it, for those that take its place."""
        return self.run_dir / "tokenizer.json"

    @property
    def events_file(self) -> Path:
        return self.run_dir / "events.jsonl"

    @property
    def roster_file(self) -> Path:
        """File in which the scheduler notes which sequences the engine has."""
        return self.run_dir / "roster"

    @property
    def suspects_file(self) -> Path:
        """File in which the launcher notes which sequences the engine may have died of."""
        return self.run_dir / "suspects"

    @property
    def tenants_file(self) -> Path:
        """Table of tenants: who has which API key and may do what."""
        return self.run_dir / "tenants.json"

    @property
    def adapters_file(self) -> Path:
        """Table of adapters that are served by name, once it has been changed."""
        return self.run_dir / "adapters.json"

    @property
    def nodes_file(self) -> Path:
        """Addresses of the launch's machines, where there are several."""
        return self.run_dir / "nodes"

    @property
    def inline_adapters(self) -> Path:
        """Adapters whose weights came with requests, as `runtime.ring.adapters_file` has them."""
        return self.run_dir / "adapters"

    @property
    def keys_dir(self) -> Path:
        """Keys of a launch that is served over TCP and was given none: as `runtime.ring.keys` makes them."""
        return self.run_dir / "keys"

    @property
    def lock_file(self) -> Path:
        return self.run_dir / "lock"


@dataclass(frozen=True, slots=True)
class TcpEndpoints:
    """The ports of a ring that is served over TCP: first the detokenizers', then the tokenizers'."""

    host: str
    """Host name or address of the ring as it stands in an address, so an IPv6 one in brackets; * for every
    interface.
    """
    port: int
    num_tokenizers: int
    num_detokenizers: int

    @staticmethod
    def parse(address: str, num_tokenizers: int, num_detokenizers: int) -> TcpEndpoints:
        """Read tcp://ADDRESS:PORT. Raises ValueError that says what is wrong with it."""
        host, colon, port = address.removeprefix(TCP_SCHEME).rpartition(":")
        is_number = port.isascii() and port.isdecimal()
        if not address.startswith(TCP_SCHEME) or not colon or not _is_host(host) or not is_number:
            raise ValueError(f"{address} is not tcp://ADDRESS:PORT with an IP address, localhost or *")
        last = int(port) + num_tokenizers + num_detokenizers - 1
        if not 1 <= int(port) <= last <= MAX_PORT:
            raise ValueError(
                f"{address}: the ports {port} to {last} are used, and they must lie between 1 and {MAX_PORT}"
            )
        return TcpEndpoints(host, int(port), num_tokenizers, num_detokenizers)

    @property
    def is_loopback(self) -> bool:
        return self.host == "localhost" or (self.host != ANY_HOST and _ip(self.host).is_loopback)

    def client_out(self, index: int) -> str:
        return f"{TCP_SCHEME}{self.host}:{self.port + index}"

    def tokenizer_in(self, index: int) -> str:
        return f"{TCP_SCHEME}{self.host}:{self.port + self.num_detokenizers + index}"


def tcp_endpoints(config: RuntimeConfig) -> TcpEndpoints | None:
    """Return where the client library is served over TCP; None: nowhere. Raises ValueError that says what is
    wrong with the address.
    """
    if not config.zmq_bind:
        return None
    return TcpEndpoints.parse(config.zmq_bind, config.tokenizer_workers, config.detokenizer_workers)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Raises ValueError."""
    if host.startswith("[") and host.endswith("]"):
        return ipaddress.IPv6Address(host[1:-1])
    return ipaddress.IPv4Address(host)


def _is_host(host: str) -> bool:
    if host in ("localhost", ANY_HOST):
        return True
    try:
        _ip(host)
    except ValueError:
        return False
    return True
