"""RemoteHost: another machine of a launch, as node 0 sees it: its agent, and the ranks that run there."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from runtime.base.errors import EXIT_INTERNAL, StartError
from runtime.launcher.hosts.host import Child, ProcessPlace
from runtime.ring.node_messages import KillRank, NodeBeat, RankBeat, RankEnded, StartRank, ToAgent
from runtime.wire.messages import ProcessFailed, ProcessReady
from runtime.wire.status_page import STATES, ProcessStatus

LOST = -signal.SIGKILL
"""Exit code of a rank whose node is lost: it was ended from outside, not by a request."""
HostNews: TypeAlias = ProcessReady | ProcessFailed


class RemoteChild(Child):
    """Rank on another machine, in the state that the agent there reports."""

    def __init__(
        self, host: RemoteHost, place: ProcessPlace, epoch: int, wait: Callable[[float], None]
    ) -> None:
        """wait: receives messages of agents for some seconds, or until one has arrived."""
        super().__init__(place, epoch)
        self._host = host
        self._wait = wait
        self._is_killed = False
        self.code: int | None = None
        self.beat: RankBeat | None = None
        self.heard_ns = 0
        """Time at which its heartbeat last changed, on this machine's clock."""

    @property
    def pid(self) -> int:
        return self.beat.pid if self.beat else 0

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped it."""
        return self.beat is not None and self.beat.is_stopped

    def kill(self) -> None:
        """Kill the rank. Its end is then reported like any other. May be called from a signal handler."""
        if not self._is_killed:
            self._is_killed = True
            self._host.orders.append(KillRank(self.place.index, self.epoch))

    def terminate(self) -> None:
        """Ask the rank to end. A rank has nothing to finish, so it is killed."""
        self.kill()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait up to timeout_s for its end. Returns True if it has ended."""
        if self.code is None:
            self._wait(timeout_s)
        return self.code is not None

    def is_among(self, fired: Collection[Any]) -> bool:
        """Return True if it has ended; `fired` is ignored."""
        return self.code is not None

    def poll(self) -> int | None:
        """Return the exit code of the rank, or minus the signal; None while it runs."""
        return self.code

    def reap(self) -> int:
        """Wait for the end of the rank and forget it. Returns the same as `poll`."""
        while self.code is None:
            self._wait(0.1)
        self._host.forget(self)
        return self.code


class RemoteHost:
    def __init__(self, node: int, wait: Callable[[float], None]) -> None:
        """Start without an agent. wait: receives messages of agents for some seconds, or until one has
        arrived.
        """
        self.name = f"node {node}"
        self.address = ""
        self.peer: bytes | None = None
        """ZMQ identity of its agent; None while it is not connected."""
        self.silent_s = 0.0
        """Seconds of silence, not counting time in which this launcher was delayed."""
        self.orders: deque[ToAgent] = deque()
        """Orders to be sent to the agent in the next turn."""
        self._wait = wait
        self._ranks: dict[int, RemoteChild] = {}

    @property
    def full_name(self) -> str:
        """Name of the node and, once it is known, its address."""
        return f"{self.name} ({self.address})" if self.address else self.name

    def start(self, place: ProcessPlace, epoch: int) -> RemoteChild:
        """Order the start of a rank. Raises StartError if the node has not joined."""
        if self.peer is None:
            raise StartError(f"{place.name} cannot be started: {self.full_name} is not there")
        child = self._ranks[place.index] = RemoteChild(self, place, epoch, self._wait)
        self.orders.append(StartRank(place.index, epoch))
        return child

    def forget(self, child: RemoteChild) -> None:
        """Forget a rank that has ended."""
        if self._ranks.get(child.place.index) is child:
            del self._ranks[child.place.index]

    def join(self, peer: bytes, address: str) -> None:
        """Record that the node's agent has joined."""
        self.peer, self.address, self.silent_s = peer, address, 0.0
        self.orders.clear()

    def lose(self, reason: str) -> list[HostNews]:
        """Record that the node's agent is gone, and its ranks with it. Returns the resulting messages about
        them.
        """
        self.peer = None
        self.orders.clear()
        running = [child for child in self._ranks.values() if child.code is None]
        for child in running:
            child.code = LOST
        return [
            ProcessFailed(child.place.name, f"{self.full_name} {reason}", EXIT_INTERNAL) for child in running
        ]

    def end(self, ended: RankEnded) -> None:
        """Record that a rank has ended; ignored for a rank of another epoch, which was given up before."""
        child = self._ranks.get(ended.index)
        if child is not None and child.epoch == ended.epoch and child.code is None:
            child.code = ended.code

    def is_news(self, message: HostNews) -> bool:
        """Return True if a message is about a rank of this node."""
        return any(child.place.name == message.role for child in self._ranks.values())

    def show(self, beat: NodeBeat, now_ns: int) -> list[tuple[int, ProcessStatus]]:
        """Return the status page slots of its ranks. The age of a heartbeat is counted from the last reported
        change, on this machine's clock.
        """
        slots = []
        for rank in beat.ranks:
            child = self._ranks.get(rank.index)
            if child is None or child.epoch != rank.epoch or child.code is not None:
                continue
            if child.beat is None or child.beat.heartbeat_ns != rank.heartbeat_ns:
                child.heard_ns = now_ns
            child.beat = rank
            # No pid: on this machine the number would name another process.
            status = ProcessStatus(rank.epoch, 0, STATES[rank.state], child.heard_ns, loaded=rank.loaded)
            slots.append((rank.index, status))
        return slots
