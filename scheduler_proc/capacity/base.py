"""CapacityPolicy: the seam for who fits and who gives way. Estimates only; the KV cache manager has the last
word on every page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.wire.format import IntArray
from scheduler_proc.cache.kv_cache_manager import Prefix
from scheduler_proc.core.request import Request
from scheduler_proc.core.row_columns import RowArray


class CapacityPolicy(Protocol):
    """Changes nothing but its own estimates: it answers, the batch builder and the prefill adder act."""

    closes_batches: bool
    """True where a batch is chosen at once and then closed: whoever fits gets a row in the step that opens
    it, even if the budget of that step is spent.
    """

    @property
    def guards_growth(self) -> bool:
        """Tell whether `may_grow` is to be asked before a running row takes pages. Read once a step."""

    def admits(self) -> bool:
        """Tell whether anybody may get a row in this step. Asked at most once a step, before
        `try_promise`.
        """

    def try_promise(self, req: Request, prefix: Prefix, extra_pages: int) -> bool:
        """Tell whether a waiting request, whose cached prefix is locked, fits beside what running ones and
        earlier newcomers of this step were promised; if so, its pages are promised to it. extra_pages: what
        its features want besides.
        """

    def note_seated(self, num_taken: int) -> None:
        """Note that the request promised last got its row, and so many pages."""

    def may_grow(self, rows: RowArray | int, upto: IntArray | int) -> bool:
        """Tell whether all of these running rows may take pages for their first `upto` tokens now."""

    def rank(self, req: Request) -> tuple[int, int]:
        """Return the rank of a running request: when pages are short, the lowest gets them first."""

    def victim(self, candidates: Sequence[Request]) -> Request | None:
        """Return the request that gives up its row when pages are short. None: nobody does; who lacks pages
        waits for them.
        """

    def note_step(self) -> None:
        """Note that a step was planned."""

    def note_idle(self) -> None:
        """Note that nothing runs and nothing waits."""

    def note_retraction(self) -> None:
        """Note that a request lost its row."""
