"""Batching types: rules for which of the ready rows share one forward. Knows rows, but no pages.

inflight_fused   prompts and decodes share a forward
inflight         a forward computes either prompts or decodes, alternating while there are both
static           all prompts of the batch are computed first, then its decodes
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
"""Part of one forward: the rows to continue, and True if waiting requests may join."""


class Phases(Protocol):
    def of(self, ready: RowArray) -> Iterable[Phase]:
        """Yield candidate contents of the next forward, best first. The caller asks for the next candidate
        only if nothing could be done with the one before.
        """


class Fused:
    """Lets prompts and decodes share every forward."""

    def __init__(self, rows: Rows) -> None:
        pass

    def of(self, ready: RowArray) -> Iterable[Phase]:
        return ((ready, True),)


class PromptsFirst:
    """Lets decodes wait until no prompt is left to compute."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def of(self, ready: RowArray) -> Iterator[Phase]:
        decodes = self._rows.kv_len[ready] >= self._rows.num_given[ready]
        yield ready[~decodes], True
        yield ready[decodes], False


class InTurns:
    """Alternates forwards of prompts and forwards of decodes, so that neither waits long."""

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
