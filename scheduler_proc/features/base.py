"""RequestFeature: what one capability keeps about one request, and the moments at which it may act.

    waiting      ready() ── cost() ──┐ ◄──────────────────────────┐
    running                row_opened() ─ plan_row() ─ accept() ─ row_lost()    (retracted: back to waiting)
             for each chunk of prefill:   plan_chunk() ─ accept_prompt(), if it wanted positions of it
    finished                                           closing(), row_lost(), release()

Only rows whose request has a feature are visited, and of those whose features are all settled, none after
the first token of the stay. A feature may end its request by raising RequestError from
any hook that says so; it must not raise anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

from runtime.wire.messages import Closed, TensorEntry
from runtime.wire.transport import Frame
from scheduler_proc.core.samples import PromptResult, Sampled
from scheduler_proc.core.scheduled_row import ScheduledRow

EmitTensor: TypeAlias = Callable[[TensorEntry, Frame], None]
"""Function that hands a raw tensor of a request to its client."""


class Cost(NamedTuple):
    """Needs of a request that must be free before it starts, besides the pages of its own tokens."""

    rows: int = 1
    pages: int = 0
    slots: tuple[Hashable, ...] = ()
    """Contents of slots of the device; requests with an equal one share its slot. A request's adapter, which
    is no feature, comes first.
    """


NO_COST = Cost()


class RequestFeature:
    """A capability that does nothing; subclasses override the hooks they need."""

    def ready(self) -> bool:
        """Tell whether the request may be admitted now. Raises RequestError when it never can.

        Asked by the port, in the scheduler's thread, in every step while it waits: what another thread has
        finished is seen here and nowhere else.
        """
        return True

    @property
    def awaited(self) -> str:
        """Return a word for what the feature keeps the request waiting for, for who watches; empty for
        nothing.
        """
        return ""

    def cost(self) -> Cost:
        """Return what the request needs before it starts. Asked when it could be admitted; constant while it
        runs.
        """
        return NO_COST

    def row_opened(self, row: int) -> None:
        """Note that the request got a row."""

    def plan_chunk(self, row: ScheduledRow[Any]) -> None:
        """Look at a chunk of the tokens that the request came to its row with, before it is computed, with or
        without sampling: set `row.wanted` to look at some positions. Comes before plan_row; change nothing
        but `row`.
        """

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        """Add guesses or a mask to the row, which is about to sample. Change nothing but `row`: it may not be
        scheduled after all.
        """

    def accept(self, sampled: Sampled) -> list[int]:
        """See the result of a step; return the ids that count. None at all: the request is complete without
        them. Raises RequestError to end it.
        """
        return sampled.ids

    @property
    def is_settled(self) -> bool:
        """Tell whether it has nothing to plan or to see of the tokens that are still to come in this stay;
        `rows.last_time` has the time of the last one. Asked when the first one is here.
        """
        return False

    def accept_prompt(self, result: PromptResult) -> None:
        """See what a chunk with `row.wanted` gave; called before the `accept` of the same step."""

    def closing(self, closed: Closed) -> Closed:
        """Return the request's terminal, with more in it. The request is about to end, and still holds what
        it has. Not called when a higher attempt takes its place.
        """
        return closed

    def row_lost(self) -> None:
        """Note that the row is gone: retracted or finished. What was in flight for it will not come."""

    def release(self) -> None:
        """Note that the request has finished."""


def combined_cost(features: Sequence[RequestFeature], own_slots: tuple[Hashable, ...] = ()) -> Cost:
    """Return what all of them need together, with the request's own slots: see Request.contents."""
    if not features:
        return Cost(slots=own_slots) if own_slots else NO_COST
    costs = [feature.cost() for feature in features]
    return Cost(
        1 + sum(cost.rows - 1 for cost in costs),
        sum(cost.pages for cost in costs),
        sum((cost.slots for cost in costs), own_slots),
    )
