"""RequestFeature: state of one capability for one request, and the hooks in which it may act.

    waiting      ready() ── cost() ──┐ ◄──────────────────────────┐
    running                row_opened() ─ plan_row() ─ accept() ─ row_lost()    (retracted: back to waiting)
             where a mask is late:        plan_row() ─ step_undone() ─ ready()
             for each chunk of prefill:   plan_chunk() ─ accept_prompt(), if it wanted positions of it
    finished                                           closing(), row_lost(), release()

Only rows whose request has a feature are visited, and of those whose features are all settled, none after the
first token of the stay. A feature may end its request by raising RequestError from any hook that says so; it
must not raise anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

from runtime.wire.messages import Closed, TensorEntry
from runtime.wire.transport import Frame
from scheduler_proc.core.samples import PromptResult, Sampled
from scheduler_proc.core.scheduled_row import ScheduledRow

EmitTensor: TypeAlias = Callable[[TensorEntry, Frame], None]
"""Function that sends a raw tensor of a request to its client."""


class Cost(NamedTuple):
    """Resources that must be free before a request starts, besides the pages of its own tokens."""

    rows: int = 1
    pages: int = 0
    slots: tuple[Hashable, ...] = ()
    """Contents of device slots. Requests with equal contents share a slot. A request's adapter, which is not
    a feature, comes first.
    """


NO_COST = Cost()


class RequestFeature:
    """A capability that does nothing; subclasses override the hooks they need."""

    def ready(self) -> bool:
        """Return True if the request may be admitted now. Raises RequestError if it never can be.

        The port asks in every step while the request waits, in the scheduler's thread. Results of other
        threads take effect here and nowhere else, so that a run can be replayed.
        """
        return True

    @property
    def awaited(self) -> str:
        """Return a word for what the request waits for because of this feature, for monitoring; empty for
        nothing.
        """
        return ""

    def cost(self) -> Cost:
        """Return what the request needs before it starts. Called when it could be admitted; must not change
        while it runs.
        """
        return NO_COST

    def row_opened(self, row: int) -> None:
        """Called when the request has got a row."""

    def plan_chunk(self, row: ScheduledRow[Any]) -> None:
        """Look at a chunk of the given tokens before it is computed, whether or not it samples. Set
        `row.wanted` to get results for some positions. Called before plan_row; change nothing but `row`.
        """

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        """Add guesses or a mask to a row that is about to sample. Change nothing but `row`, because it may
        not be scheduled after all.
        """

    def accept(self, sampled: Sampled) -> list[int]:
        """Receive the result of a step, and return the ids that count. An empty list means that the request
        is complete without them. Raises RequestError to end it.
        """
        return sampled.ids

    @property
    def is_settled(self) -> bool:
        """Return True if the feature has nothing to plan, and needs no results, for the remaining tokens of
        this stay. Called when the first token is there. `rows.last_time` has the time of the last token.
        """
        return False

    def accept_prompt(self, result: PromptResult) -> None:
        """Receive the results of a chunk with `row.wanted`. Called before the `accept` of the same step."""

    def closing(self, closed: Closed) -> Closed:
        """Return the request's terminal message, extended if needed. Called when the request is about to end,
        while it still holds its row. Not called when a higher attempt replaces it.
        """
        return closed

    def step_undone(self) -> None:
        """Called when the row was taken out of its last step, whose result will not arrive. The device is
        told of all the row's tokens again.
        """

    def row_lost(self) -> None:
        """Called when the request has lost its row, by retraction or its end. Results in flight for it will
        not arrive.
        """

    def release(self) -> None:
        """Called when the request has finished."""


def combined_cost(features: Sequence[RequestFeature], own_slots: tuple[Hashable, ...] = ()) -> Cost:
    """Return what all features need together, with the request's own slots (Request.contents)."""
    if not features:
        return Cost(slots=own_slots) if own_slots else NO_COST
    costs = [feature.cost() for feature in features]
    return Cost(
        1 + sum(cost.rows - 1 for cost in costs),
        sum(cost.pages for cost in costs),
        sum((cost.slots for cost in costs), own_slots),
    )
