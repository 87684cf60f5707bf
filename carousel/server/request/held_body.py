"""HeldBody: the room and the turn that one request holds in its HTTP process because of its body."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from carousel.server.http.body_pool import SMALL_BYTES, BodyPool, BodyShare
from carousel.server.tenancy.fair_turns import FairTurns

STATE = "held_body"
"""Name of a request's HeldBody in the state of its scope."""


class HeldBody:
    """A request's share of the room for bodies that are read, its share of that for prompts that are kept,
    and its turn to have its prompts cut.

    A prompt that is to be truncated may be a hundred times as long as what is left of it. While such prompts
    wait for their turn, they are bytes of a body, which are smaller than texts and keep others from being
    read. The share of them is released when the prompt has been cut.
    """

    def __init__(self, reading: BodyPool, kept: BodyPool, tenant: str) -> None:
        self.reading: BodyShare = reading.share(tenant)
        self.kept: BodyShare = kept.share(tenant)
        self.asked_s = 0.0
        """Time of asking for the turn, by time.perf_counter()."""
        self._turns: FairTurns | None = None
        """Turns of which it has one."""
        self._tenant = tenant

    @property
    def has_turn(self) -> bool:
        """True while the prompts may be decoded and cut."""
        return self._turns is not None

    async def take_turn(self, turns: FairTurns) -> None:
        """Wait for the turn in which the prompts may be decoded and cut."""
        self.asked_s = time.perf_counter()
        await turns.take(self._tenant)
        self._turns = turns

    def end_reading(self) -> None:
        """Release what the request holds as long as its body is read; one that has the turn keeps it."""
        if not self.has_turn:
            self.reading.release()

    def end_turn(self, num_bytes: int) -> None:
        """Pass on the turn once the prompts have been cut. `num_bytes` are kept of them."""
        self._pass_on()
        self.reading.release()
        self.kept.shrink_to(num_bytes if num_bytes > SMALL_BYTES else 0)

    def release(self) -> None:
        """Release all. May be called again."""
        self._pass_on()
        self.reading.release()
        self.kept.release()

    def _pass_on(self) -> None:
        if self._turns is not None:
            self._turns.pass_on()
            self._turns = None


def release_body(state: MutableMapping[str, Any]) -> None:
    """Release what a request that has ended holds because of its body. `state`: that of its scope."""
    held: HeldBody | None = state.pop(STATE, None)
    if held is not None:
        held.release()
