"""RingState: whether the ring is there and complete, and what its connection must do. It has no sockets and
no clock: it gets events and times, and answers with commands.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from runtime.base.errors import RingClosed
from runtime.wire.format import PING_S as PING_S
from runtime.wire.format import SILENCE_S
from runtime.wire.status_page import ProcessState, RingStatus

TICK_S = 0.1
CONNECT_TIMEOUT_S = 10.0
"""Seconds that a client waits for the answer of a ring that it has found."""
RING_TIMEOUT_S = 120.0
"""Seconds for which the ring may lack a process. A large model takes long to load."""
RestartedRole: TypeAlias = Literal["engine", "tokenizer", "detokenizer"]


@dataclass(frozen=True, slots=True)
class Restart:
    """Command to report that a process, or the engine as a whole, was replaced by one that is ready."""

    role: RestartedRole
    index: int
    generation: int
    """Number of the restart among those that the connection has seen, from 1."""


@dataclass(frozen=True, slots=True)
class ReplaceLane:
    """Command to connect to a detokenizer anew under the same id. Messages of the old connection are still
    received.
    """

    index: int


@dataclass(frozen=True, slots=True)
class SendPing:
    """Command to send a ping to a detokenizer, or a Hello if it has not answered."""

    index: int


@dataclass(frozen=True, slots=True)
class RetryLink:
    """Command to connect anew to a tokenizer that has refused the connection, because it may not have read
    our key yet.
    """

    index: int


Command: TypeAlias = Restart | ReplaceLane | SendPing | RetryLink


class RingState:
    def __init__(self, name: str, *, is_remote: bool, ring_timeout_s: float) -> None:
        """name: of the runtime, for messages. is_remote: True if only connections show whether the ring is
        there.
        """
        self.generation = 0
        """Number of restarts that were seen."""
        self._name = name
        self._is_remote = is_remote
        self._ring_timeout_s = ring_timeout_s
        self._epochs: dict[tuple[RestartedRole, int], int] = {}
        self._are_processes_whole = True
        """True if every known process can serve, as the ring says."""
        self._heard_at: dict[int, float] = {}
        """Time of the last message of each detokenizer that has answered, whose lane is therefore open."""
        self._num_lanes = 0
        self._broken_links: set[int] = set()
        """Tokenizers whose connections were lost or refused, and are not established again."""
        self._whole_at = 0.0
        """Time at which every process could last serve."""
        self._next_tick_at = 0.0
        self._next_ping_at = 0.0
        self._looks_away_until = 0.0

    def begin(self, num_lanes: int, now: float) -> None:
        """Start to count time: all lanes have been opened."""
        self._num_lanes = num_lanes
        self._heard_at = dict.fromkeys(range(num_lanes), now)
        self._whole_at = self._next_tick_at = now

    # -- what happens ----------------------------------------------------------------------------------------

    def is_open(self, lane: int) -> bool:
        return lane in self._heard_at

    def hear(self, lane: int, now: float) -> list[Command]:
        """Record a message of a detokenizer. On a lane that was not open it is the answer to a Hello."""
        was_open = lane in self._heard_at
        self._heard_at[lane] = now
        return [] if was_open else [self._restart("detokenizer", lane)]

    def see(self, status: RingStatus | None) -> list[Command]:
        """Handle the state that the ring shows of its processes; None: none. A process that was unknown
        before is not a change.
        """
        commands: list[Command] = []
        if status is None:
            return commands
        self._are_processes_whole = True
        for role, index, process in _processes(status):
            if not process.epoch:
                continue
            self._are_processes_whole &= process.is_ready
            known = self._epochs.setdefault((role, index), process.epoch)
            if process.epoch == known or not process.is_ready:
                continue
            self._epochs[role, index] = process.epoch
            # Over TCP, the loss of a connection shows it earlier and more reliably.
            if role == "engine" or not self._is_remote:
                commands.append(self._replace(index) if role == "detokenizer" else self._restart(role, index))
        return commands

    def see_links(self, broken: Collection[int], standing: Collection[int]) -> list[Command]:
        """Handle changes of tokenizers' connections: those that have broken or were refused since the last
        call, and those that are established now. Messages sent on a broken connection may be lost.
        """
        self._broken_links.update(broken)
        healed = self._broken_links.intersection(standing)
        self._broken_links -= healed
        return [self._restart("tokenizer", index) for index in sorted(healed)]

    def is_due(self, now: float) -> bool:
        return now >= self._next_tick_at

    def tick(
        self, now: float, why_gone: str, status: RingStatus | None, lost: Collection[int]
    ) -> list[Command]:
        """Check the ring, and the lanes whose connections are `lost`. Call `check` after carrying out the
        commands. Raises RingClosed if the ring is gone.
        """
        late_s, self._next_tick_at = now - self._next_tick_at, now + TICK_S
        if late_s > SILENCE_S:
            return self._rejoin(now)
        self.check_gone(why_gone)
        commands: list[Command] = []
        if now >= self._next_ping_at:
            self._next_ping_at = now + PING_S
            commands += map(SendPing, range(self._num_lanes))
            commands += map(RetryLink, sorted(self._broken_links))
        commands += self.see(status)
        # A process that hangs will be replaced, and one that could not hear us for so long has forgotten this
        # client.
        commands += [
            self._replace(lane)
            for lane, heard_at in list(self._heard_at.items())
            if lane in lost or now - heard_at > SILENCE_S
        ]
        return commands

    def check(self, now: float, why_gone: str, *, are_links_lost: bool) -> None:
        """Raise RingClosed if the ring is gone, or lacks a process for too long. are_links_lost: True if all
        connections are lost, which only happens when the whole ring ends.
        """
        if now < self._looks_away_until:
            return
        self.check_gone(why_gone)
        if are_links_lost and not self._heard_at:
            raise RingClosed(f"the connection to the runtime at {self._name} was lost")
        if self.is_whole(now):
            self._whole_at = now
        elif now - self._whole_at > self._ring_timeout_s:
            raise RingClosed(
                f"the runtime at {self._name} has lacked a process, or one that answers, for "
                f"{self._ring_timeout_s:g} s{self._link_hint()}"
            )

    def check_gone(self, why_gone: str) -> None:
        if why_gone:
            raise RingClosed(f"the runtime at {self._name} is gone: {why_gone}")

    def is_whole(self, now: float) -> bool:
        """Return True if every process can serve, as far as this can be seen. A process that hangs may be
        replaced like a dead one.
        """
        return (
            self._are_processes_whole
            and not self._broken_links
            and len(self._heard_at) == self._num_lanes
            and all(now - heard_at <= SILENCE_S for heard_at in self._heard_at.values())
        )

    # -- what follows ----------------------------------------------------------------------------------------

    def _rejoin(self, now: float) -> list[Command]:
        """Handle that this process, and perhaps the whole machine, was stopped for so long that the ring has
        forgotten it. Silence of others is counted from now on.
        """
        self._whole_at = now
        self._next_tick_at = self._looks_away_until = now + PING_S
        return [self._replace(lane) for lane in list(self._heard_at)]

    def _link_hint(self) -> str:
        if not self._broken_links:
            return ""
        indices = ", ".join(map(str, sorted(self._broken_links)))
        return f"; out of reach, or refusing this client's key: tokenizer {indices}"

    def _replace(self, lane: int) -> ReplaceLane:
        self._heard_at.pop(lane, None)
        return ReplaceLane(lane)

    def _restart(self, role: RestartedRole, index: int) -> Restart:
        self.generation += 1
        return Restart(role, index, self.generation)


def _processes(status: RingStatus) -> list[tuple[RestartedRole, int, ProcessState]]:
    return [
        ("engine", 0, status.engine),
        *(("tokenizer", index, process) for index, process in enumerate(status.tokenizers)),
        *(("detokenizer", index, process) for index, process in enumerate(status.detokenizers)),
    ]
