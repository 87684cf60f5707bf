"""Endpoints: every file and socket name inside a run directory, and every TCP port. Each launch has a private
directory, so launches share no names.

A run directory has mode 0700 and is locked while its launch lives. One whose lock is free is a leftover,
which the next launch removes.
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
        """Return the address of a tokenizer. Requests with number `seq`, and their aborts, go to tokenizer
        `seq` modulo the number of tokenizers.
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
        """Return the address at which the grammar process answers. The scheduler binds it, because it waits
        for masks in the middle of a turn.
        """
        return self._ipc("grammar_out")

    def detokenizer_in(self, index: int = 0) -> str:
        """Return the address of a detokenizer. Each detokenizer draws the ids of its clients so that a
        sequence belongs to number `client` modulo the number of detokenizers.
        """
        return self._ipc(f"detokenizer_in{index}")

    def client_out(self, index: int = 0) -> str:
        return self._ipc(f"client_out{index}")

    def api_orders(self, index: int) -> Path:
        """Return the socket on which an HTTP process receives commands that another HTTP process
        was given.
        """
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
        """Return the directory in which the ranks of one epoch find each other."""
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
        """Return the file of the loaded tokenizer, which its first process leaves for its successors."""
        return self.run_dir / "tokenizer.json"

    @property
    def events_file(self) -> Path:
        return self.run_dir / "events.jsonl"

    @property
    def roster_file(self) -> Path:
        """Return the file in which the scheduler records the engine's sequences."""
        return self.run_dir / "roster"

    @property
    def suspects_file(self) -> Path:
        """Return the file in which the launcher records the sequences that may have killed the engine."""
        return self.run_dir / "suspects"

    def in_hand_file(self, role: str, index: int) -> Path:
        """Return the file in which a process records the requests that it works on at the moment."""
        return self.run_dir / f"in_hand_{role}{index}"

    def suspects_file_of(self, role: str) -> Path:
        """Return the file in which the launcher records the requests that may have killed processes of a role
        outside of the engine.
        """
        return self.run_dir / f"suspects_{role}"

    @property
    def tenants_file(self) -> Path:
        """Return the file of the tenants' table: API keys and roles."""
        return self.run_dir / "tenants.json"

    @property
    def adapters_file(self) -> Path:
        """Return the file with the table of named adapters, written when it is first changed."""
        return self.run_dir / "adapters.json"

    @property
    def nodes_file(self) -> Path:
        """Return the file with the addresses of the launch's machines, if there are several."""
        return self.run_dir / "nodes"

    @property
    def inline_adapters(self) -> Path:
        """Return the directory of adapters whose weights came with requests; see
        `runtime.ring.adapters_file`.
        """
        return self.run_dir / "adapters"

    @property
    def keys_dir(self) -> Path:
        """Return the directory of keys that a launch makes if it is served over TCP without --curve-dir; see
        `runtime.ring.keys`.
        """
        return self.run_dir / "keys"

    @property
    def lock_file(self) -> Path:
        return self.run_dir / "lock"


@dataclass(frozen=True, slots=True)
class TcpEndpoints:
    """TCP ports of a ring: first those of the detokenizers, then those of the tokenizers."""

    host: str
    """Host name or address of the ring in the form used within an address, with brackets around IPv6; * for
    every interface.
    """
    port: int
    num_tokenizers: int
    num_detokenizers: int

    @staticmethod
    def parse(address: str, num_tokenizers: int, num_detokenizers: int) -> TcpEndpoints:
        """Parse tcp://ADDRESS:PORT. Raises ValueError, which says what is wrong."""
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
    """Return the TCP ports for the client library; None if it is not served over TCP. Raises ValueError,
    which says what is wrong with the address.
    """
    if not config.zmq_bind:
        return None
    return TcpEndpoints.parse(config.zmq_bind, config.tokenizer_workers, config.detokenizer_workers)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address. Raises ValueError."""
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
