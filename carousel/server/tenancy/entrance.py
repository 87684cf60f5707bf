"""Entrance: lets requests that have been read go on, a few in each turn of the event loop.

What a request needs, from its JSON to the message that is sent, takes its time in one piece. A thousand that
come together would have the loop to themselves for a second, in which nobody's tokens go out, no probe is
answered, and nobody is seen to leave.
"""

from __future__ import annotations

import asyncio

from runtime.base.paced_line import PacedLine

TURN_BYTES = 256 << 10
"""Bytes of bodies in a turn, and one body of any size: a few milliseconds' work. What a larger one holds is
decoded in several turns (`decode_body`).
"""
LEAST_BYTES = 32 << 10
"""As many as a small body counts for: the work for a request that does not grow with it."""


class Entrance:
    """Of one event loop. Who comes first goes first."""

    def __init__(self) -> None:
        self._line = PacedLine(TURN_BYTES)

    async def enter(self, num_bytes: int) -> None:
        """Wait until a body of so many bytes may go on: not at all where there is no crowd."""
        place = asyncio.get_running_loop().create_future()
        self._line.wake(place, max(num_bytes, LEAST_BYTES))
        await place
