"""SharedSnapshot: snapshot of the scheduler that all callers of this process share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

INTERVAL_S = 0.25
"""Least seconds between two questions to the scheduler."""


class SharedSnapshot:
    """Shared snapshot, requested from the scheduler when it is read. It belongs to one event loop."""

    def __init__(
        self, ask: Callable[[], Awaitable[dict[str, Any]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` asks the scheduler."""
        self._ask = ask
        self._clock = clock
        self._answer: asyncio.Task[bytes] | None = None
        self._asked_at = 0.0

    async def read(self) -> bytes:
        """Return the snapshot as JSON: one that is on its way, one that was requested less than INTERVAL_S
        ago, or a new one. Raises what `ask` raises.
        """
        answer, now = self._answer, self._clock()
        if answer is None or (answer.done() and now - self._asked_at >= INTERVAL_S):
            self._asked_at = now
            answer = self._answer = asyncio.create_task(self._read())
            answer.add_done_callback(_look_at)  # every waiting caller may have left
        return await asyncio.shield(answer)

    async def _read(self) -> bytes:
        return msgspec.json.encode(await self._ask())


def _look_at(answer: asyncio.Task[bytes]) -> None:
    if not answer.cancelled():
        answer.exception()
