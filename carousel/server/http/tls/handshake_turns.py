"""HandshakeTurns: limits the TLS handshakes that a process makes in one turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from ipaddress import IPv6Address, IPv6Network

TURN_S = 0.001
"""CPU time of the handshakes of a turn, after which no further one is begun. The server's part of one takes
0.4 ms with a key of P-256, and 5.4 with RSA of 4,096 bits (2026-11). More in a turn would not be faster, and
connections are accepted a few in a turn: a flood would hold up those that wait for that.
"""
SITE_BITS = 64
"""Length of the prefix of IPv6 addresses that belong to one network, and so may belong to one caller."""


class HandshakeTurns:
    """Turns of one event loop. Networks take turns, and each network's handshakes are made in the order in
    which they come.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._lines: dict[str, deque[Callable[[], None]]] = {}
        """By network; the first one is next."""
        self._new: list[tuple[str, Callable[[], None]]] = []
        """Network of each that has come since the last turn began."""
        self._is_due = False
        """True if the next turn is scheduled, or in a turn."""

    def wait(self, address: str, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a later turn, behind what the turn that runs now schedules on the event loop.
        `address` is the client's.
        """
        self._new.append((network_of(address), go_on))
        self._make_due()

    def _make_due(self) -> None:
        if (self._new or self._lines) and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        for network, go_on in self._new:
            self._lines.setdefault(network, deque()).append(go_on)
        self._new.clear()
        end_s = self._clock() + TURN_S
        try:
            while self._lines:
                self._pop_next()()
                if self._clock() >= end_s:
                    break
        finally:
            self._is_due = False
            self._make_due()

    def _pop_next(self) -> Callable[[], None]:
        network, line = next(iter(self._lines.items()))
        del self._lines[network]
        go_on = line.popleft()
        if line:
            self._lines[network] = line
        return go_on


def network_of(address: str) -> str:
    """Return what stands for all addresses that one caller can have: an IPv4 address, or an IPv6 network."""
    if ":" not in address:
        return address
    parsed = IPv6Address(address.partition("%")[0])
    return str(parsed.ipv4_mapped or IPv6Network((parsed, SITE_BITS), strict=False))
