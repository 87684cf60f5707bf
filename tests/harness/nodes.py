"""Launches over nodes of this machine: loopback addresses and separate run directories."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.ring.launched import ROOT, START_S, Launched, free_ports, wait_until

HOST, OTHER = "127.0.0.2", "127.0.0.3"
THIRD, FOURTH = "127.0.0.4", "127.0.0.5"
NUM_PORTS = 6
PORT_APART = 29500
LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""
LISTENS_UNIX = "00010000"
"""Flags of one in /proc/net/unix."""


SMALL_POOL = (
    *("--dtype", "float32", "--no-http", "--max-total-tokens", "512", "--max-running-requests", "24"),
    *("--schedule-conservativeness", "0.1", "--page-size", "4"),
)
"""Settings of a launch in which somebody has to give way, again and again."""
POOL = (*SMALL_POOL, "--skip-tokenizer-init")
"""The same without a tokenizer, which is ready sooner."""

DELAY_S = 0.002
MAY_BE_APART = os.getuid() == 0 and shutil.which("ip") is not None and os.access("/dev/net/tun", os.W_OK)
"""Networks of their own need root, ip and /dev/net/tun."""


def ids_of(number: int) -> list[int]:
    """A prompt of a few ids, another one for each number."""
    return [100 + (37 * number + 11 * at) % 3900 for at in range(14)]


class Nodes:
    """Node 0, which has the ring, and node 1, which has an agent; a third one if there are three."""

    def __init__(
        self,
        *arguments: str,
        apart: Apart | None = None,
        of_other: tuple[str, ...] = (),
        has_other: bool = True,
        count: int = 2,
        layout: tuple[int, int] | None = None,
    ) -> None:
        """`apart`: networks of their own; on loopback addresses when not given. `of_other`: arguments that
        node 1 alone has. `has_other`: False leaves it out. `count`: nodes. `layout`: stages, and ranks of
        each; when not given one stage with a rank on each node.
        """
        self.cable = apart
        """None on loopback addresses."""
        self.hosts = apart.addresses if apart else (HOST, OTHER, THIRD, FOURTH)[:count]
        self._prefixes = apart.prefixes if apart else ((),) * count
        self.port = PORT_APART if apart else free_ports(NUM_PORTS, HOST)
        num_stages, tp_size = layout or (1, count)
        self._ranks_per_node = num_stages * tp_size // count
        self._both = (
            *("--device", "cpu", "--nnodes", str(count), "--tp-size", str(tp_size)),
            *("--pp-size", str(num_stages), "--cpu-threads", "1", *arguments),
        )
        self._own: tuple[tuple[str, ...], ...] = ((), *(("--node-addr", host) for host in self.hosts[1:]))
        if apart:
            self._own = tuple(
                ("--trusted-network", name, "--node-key", apart.key) for name in apart.interfaces
            )
        self.zero = self.start(0)
        self._other = self.start(1, *of_other) if has_other else None
        self.rest = [self.start(node) for node in range(2, count)]

    @property
    def other(self) -> Launched:
        """Node 1."""
        assert self._other is not None
        return self._other

    def start(self, node: int, *arguments: str) -> Launched:
        """Start a node; `arguments`: those that the other one has not, or has otherwise."""
        where = ("--dist-addr", f"{self.hosts[0]}:{self.port}", "--node-rank", str(node))
        return Launched(*self._both, *where, *self._own[node], *arguments, prefix=self._prefixes[node])

    def replace_other(self) -> None:
        """Start node 1 again, as what has started it would."""
        self.other.close()
        self._other = self.start(1)

    @property
    def run_dir(self) -> Path:
        return self.zero.run_dir

    def pid_of_rank(self, rank: int) -> int:
        """Process of a rank."""
        node = rank // self._ranks_per_node
        return (self.zero, self.other, *self.rest)[node].pid_of("worker", rank)

    def wait_whole(self) -> None:
        """Wait until all processes are there and ready, after one of them was ended."""
        wait_until(
            lambda: all(child["ready"] for child in self.zero.state()["children"]),
            START_S,
            "the launch is ready again",
        )

    def cut_off(self, seconds: float) -> None:
        """Have the nodes hear nothing of each other for so long: the cable, where there is one, is cut, else
        the agent is stopped.
        """
        if self.cable is not None:
            self.cable.cut(seconds)
            return
        os.kill(self.other.process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.other.process.pid, signal.SIGCONT)

    @contextmanager
    def slow(self, delay_s: float) -> Iterator[None]:
        """Have a cable that takes time take so long in the block. Without one: nothing."""
        cable = self.cable if self.cable is not None and self.cable.delay_s else None
        if cable is not None:
            cable.delay(delay_s)
        yield
        if cable is not None:
            cable.delay(cable.delay_s)

    def close(self) -> None:
        self.zero.close()
        if self._other is not None:
            self._other.close()
        for each in self.rest:
            each.close()


@contextmanager
def nodes(
    *arguments: str, apart: Apart | None = None, count: int = 2, layout: tuple[int, int] | None = None
) -> Iterator[Nodes]:
    """Nodes that serve; ended and cleaned up with the block."""
    both = Nodes(*arguments, apart=apart, count=count, layout=layout)
    try:
        try:
            both.zero.wait_ready()
        except (AssertionError, TimeoutError) as error:
            raise type(error)(f"{error}\nnode 1:\n{both.other.log()}") from None
        yield both
    finally:
        both.close()


def listening_hosts(pids: Iterable[int]) -> set[str]:
    """IPv4 addresses at which processes listen, each in its own network."""
    found = set()
    for pid in pids:
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        hosts = {row[9]: row[1].partition(":")[0] for row in rows if row[3] == LISTENS}
        own = _sockets_of(pid)
        found |= {socket.inet_ntoa(bytes.fromhex(hosts[inode])[::-1]) for inode in hosts.keys() & own}
    return found


def listening_names(pid: int) -> set[str]:
    """Names of the unix sockets at which a process listens."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    names = {row[6]: Path(row[7]).name for row in rows if len(row) == 8 and row[3] == LISTENS_UNIX}
    return {names[inode] for inode in names.keys() & _sockets_of(pid)}


def _sockets_of(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    return found


CONTAINER = (
    *("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"),
)
"""Command that runs another one as the first process of a container: it sees no other process and no memory
that others share, as a pod does not.
"""


_numbers = itertools.count()


class Apart:
    """Two networks of their own, joined by a cable that can be cut. For root."""

    def __init__(self, folder: Path, delay_s: float = 0.0, *, contained: bool = False) -> None:
        """`delay_s`: time that the cable takes, either way. `contained`: node 1 is in a container."""
        self.delay_s = delay_s
        self._relay: subprocess.Popen[bytes] | None = None
        number = next(_numbers)
        self.names = tuple(f"carousel-{os.getpid()}-{number}-{node}" for node in range(2))
        self.interfaces = ("cable0", "cable1")
        self.addresses = ("10.77.0.1", "10.77.0.2")
        zero, one = (("ip", "netns", "exec", name) for name in self.names)
        self.prefixes = (zero, (*one, *CONTAINER) if contained else one)
        self.key = str(folder / "nodes.key")
        Path(self.key).write_text("0123456789abcdef" * 4)
        Path(self.key).chmod(0o600)

    def open(self) -> None:
        """Make them. Raises CalledProcessError where that is not allowed."""
        for name in self.names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        if self.delay_s:
            self._lay_slow_cable()
        else:
            peer = ("peer", "name", "cable1", "netns", self.names[1])
            _run("ip", "link", "add", "cable0", "netns", self.names[0], "type", "veth", *peer)
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _run("ip", "-n", name, "link", "set", interface, "up")

    def _lay_slow_cable(self) -> None:
        command = (sys.executable, "-m", "tests.harness.slow_cable", *self.names, str(self.delay_s))
        self._relay = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == b"made\n"

    def cut(self, seconds: float) -> None:
        """Cut the cable for so long."""
        self.down()
        time.sleep(seconds)
        self.up()

    def down(self) -> None:
        _run("ip", "-n", self.names[1], "link", "set", "cable1", "down")

    def up(self) -> None:
        _run("ip", "-n", self.names[1], "link", "set", "cable1", "up")

    def delay(self, delay_s: float) -> None:
        """Have a cable that takes time take so long from now on."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{delay_s}\n".encode())
        self._relay.stdin.flush()

    def close(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextmanager
def apart(folder: Path, delay_s: float = 0.0, *, contained: bool = False) -> Iterator[Apart]:
    """Networks that go with the block."""
    networks = Apart(folder, delay_s, contained=contained)
    try:
        networks.open()
        yield networks
    finally:
        networks.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
