"""Batching types: which of the rows that could go on share one forward. Knows rows; knows no page.

inflight_fused   prompts and decodes in one forward
inflight         a forward computes prompts or decodes, in turns while there are both
static           all prompts of the batch first, then their decodes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeAlias

from scheduler_proc.core.row_columns import RowArray
from scheduler_proc.core.rows import Rows

BATCHING_TYPES = {
    "inflight_fused": "scheduler_proc.batching.phases:Fused",
    "inflight": "scheduler_proc.batching.phases:InTurns",
    "static": "scheduler_proc.batching.phases:PromptsFirst",
}


Phase: TypeAlias = tuple[RowArray, bool]
"""Parts of one forward: these rows; and waiting requests, or not."""


class Phases(Protocol):
    def of(self, ready: RowArray) -> Iterable[Phase]:
        """Return what the next forward may be made of, given the rows that could go on. The next answer is
        asked for only if nothing came of the one before.
        """


class Fused:
    """Batching type in which prompts and decodes share every forward."""

    def __init__(self, rows: Rows) -> None:
        pass

    def of(self, ready: RowArray) -> Iterable[Phase]:
        return ((ready, True),)


class PromptsFirst:
    """Batching type in which decodes wait until no prompt is left to compute."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def of(self, ready: RowArray) -> Iterator[Phase]:
        decodes = self._rows.kv_len[ready] >= self._rows.num_given[ready]
        yield ready[~decodes], True
        yield ready[decodes], False


class InTurns:
    """Batching type in which a forward of prompts follows one of decodes: so neither waits for long."""

    def __init__(self, rows: Rows) -> None:
        self._prompts_first = PromptsFirst(rows)
        self._decodes_are_due = False

    def of(self, ready: RowArray) -> Iterator[Phase]:
        prompts, decodes = self._prompts_first.of(ready)
        first, second = (decodes, prompts) if self._decodes_are_due else (prompts, decodes)
        self._decodes_are_due = first is prompts
        yield first
        self._decodes_are_due = second is prompts
        yield second
