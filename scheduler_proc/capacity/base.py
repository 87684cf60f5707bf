"""CapacityPolicy: interface of the policy that decides which requests fit and which give way. It only
estimates; the KV cache manager has the last word on every page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.wire.format import IntArray
from scheduler_proc.cache.kv_cache_manager import Prefix
from scheduler_proc.core.request import Request
from scheduler_proc.core.row_columns import RowArray


class CapacityPolicy(Protocol):
    """Decides which requests fit. It changes nothing but its own estimates; the batch builder and the prefill
    adder carry its answers out.
    """

    closes_batches: bool
    """True if a batch is chosen at once and then closed. Every request that fits then gets a row in the step
    that opens the batch, even if that step's budget is spent.
    """

    @property
    def guards_growth(self) -> bool:
        """Return True if `may_grow` must be asked before a running row takes pages. Read once a step."""

    def admits(self) -> bool:
        """Return True if any request may get a row in this step. Called at most once a step, before
        `try_promise`.
        """

    def try_promise(self, req: Request, prefix: Prefix, extra_pages: int) -> bool:
        """Promise pages to a waiting request, whose cached prefix is locked, if it fits beside what was
        promised to running requests and earlier newcomers of this step. Returns False if it does not fit.
        extra_pages: further pages that its features need.
        """

    def note_seated(self, num_taken: int) -> None:
        """Record that the request promised last got its row, with num_taken pages."""

    def may_grow(self, rows: RowArray | int, upto: IntArray | int) -> bool:
        """Return True if all these running rows may take pages for their first `upto` tokens now."""

    def rank(self, req: Request) -> tuple[int, int]:
        """Return the sort key of a running request: when pages are short, the lowest gets them first."""

    def victim(self, candidates: Sequence[Request]) -> Request | None:
        """Return the candidate that gives up its row when pages are short. None: no row is given up, and the
        request that lacks pages waits for them.
        """

    def note_step(self) -> None:
        """Record that a step was planned."""

    def note_idle(self) -> None:
        """Record that nothing runs and nothing waits."""

    def note_retraction(self) -> None:
        """Record that a request was retracted."""
