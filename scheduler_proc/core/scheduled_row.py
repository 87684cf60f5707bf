"""ScheduledRow: a row of a step that is more than a plain decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from runtime.wire.format import TOKEN_BYTES, IntArray
from scheduler_proc.core.row_columns import RowColumns

R = TypeVar("R")
"""The request; features are shown the row and know nothing of it."""

FUTURE = -1
"""An input id that only the device knows: FutureMap[row]."""
ONE_FUTURE: IntArray = np.array([FUTURE], np.int32)


class WantedPositions(NamedTuple):
    """Positions of a chunk whose logits are looked at: PromptPositions without the place of its row."""

    first: int
    targets: bytes
    num_logprobs: int
    returns_logits: bool

    @property
    def num_positions(self) -> int:
        return len(self.targets) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class ScheduledRow(Generic[R]):
    """A row that is more than a plain decode: a chunk of prefill, or something attached to it."""

    req: R
    row: int
    start: int
    num_known: int
    """New tokens that are the request's own."""
    samples: bool
    is_prefill: bool
    guesses: Sequence[int] = ()
    """Ids to verify behind them."""
    make_mask: Callable[[], bytes] | None = None
    """Makes the bitmask of allowed ids; asked after every earlier step is committed."""
    wanted: WantedPositions | None = None

    @property
    def num_new(self) -> int:
        return self.num_known + len(self.guesses)

    def input_ids(self, rows: RowColumns) -> IntArray:
        """[num_new] int32: those the host knows, FUTURE for those still in flight, the guesses."""
        end, num_tokens = self.start + self.num_known, rows.num_tokens.item(self.row)
        if not self.guesses:
            if end <= num_tokens:
                return rows.tokens[self.row, self.start : end]
            if self.num_known == 1:
                return ONE_FUTURE
        known = rows.tokens[self.row, self.start : min(end, num_tokens)]
        num_future = self.num_known - len(known)
        return np.concatenate([known, np.array([*[FUTURE] * num_future, *self.guesses], np.int32)])
