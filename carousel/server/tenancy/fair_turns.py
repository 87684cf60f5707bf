"""FairTurns: a fixed number of turns that the tenants of an event loop take one after another."""

from __future__ import annotations

import asyncio
from collections import deque


class FairTurns:
    """Limited number of turns in one event loop. Callers of one tenant wait in their order, and tenants are
    served in rotation.
    """

    def __init__(self, num_turns: int) -> None:
        self._num_free = num_turns
        self._lanes: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting callers by tenant; the tenant that is next comes first."""

    async def take(self, tenant: str) -> None:
        """Wait for a turn. The caller ends it with `pass_on`."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.pass_on()  # it had just been given
            raise

    def pass_on(self) -> None:
        """End a turn that was taken, and give it to the next caller that waits."""
        while self._lanes:
            tenant, line = next(iter(self._lanes.items()))
            turn = line.popleft()
            has_left = turn.done()
            if not line:
                del self._lanes[tenant]
            elif not has_left:
                self._lanes[tenant] = self._lanes.pop(tenant)
            if not has_left:
                turn.set_result(None)
                return
        self._num_free += 1
