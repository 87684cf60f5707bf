"""ScheduledRow: a row of a step that is more than a plain decode."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from runtime.wire.format import TOKEN_BYTES
from runtime.wire.plan import ProcessedRow
from scheduler_proc.core.row_columns import RowColumns

R = TypeVar("R")
"""Type of the request; features are shown the row and know nothing of it."""

FUTURE = -1
"""Input id that stands for one that only the device knows: FutureMap[row]."""
ONE_FUTURE = array("i", [FUTURE]).tobytes()


class NoMask(Enum):
    """Reason why a row that needs a mask gets none."""

    LATE = "late"
    """Mask that has not come: the token cannot be drawn now, so the row is taken back, and comes again when
    the feature is ready.
    """
    COMPLETE = "complete"
    """Mask that is not needed: the output is complete as it is."""


MakeMasks: TypeAlias = Callable[[int], Sequence[bytes | int] | NoMask]
"""Function that makes bitmasks of allowed ids, or says why there are none; asked after every earlier step is
committed. It is given the number of guesses: the first mask is for the next token, the others for the places
behind guesses, as far as something may be drawn there that counts. Raises RequestError to end the request.
"""


class WantedPositions(NamedTuple):
    """Positions of a chunk whose logits are looked at: PromptPositions without the place of its row."""

    first: int
    targets: bytes
    num_logprobs: int
    returns_logits: bool
    returns_outputs: bool = False

    @property
    def num_positions(self) -> int:
        return len(self.targets) // TOKEN_BYTES


class ScheduledRow(msgspec.Struct, Generic[R], eq=False, gc=False):
    """A row that is more than a plain decode: a chunk of prefill, or something attached to it."""

    req: R
    row: int
    start: int
    num_known: int
    """Number of new tokens that are the request's own."""
    samples: bool
    is_prefill: bool
    guesses: Sequence[int] = ()
    """Ids to verify behind the request's own tokens."""
    make_masks: MakeMasks | None = None
    note_guesses: Callable[[Sequence[int]], None] | None = None
    """Function that is told the guesses which are verified, before masks are asked for. Without it a row with
    masks has no guesses.
    """
    unseen: Callable[[], ProcessedRow] | None = None
    """Function that says what tokens its logits processors have not seen; asked when masks are. None: no call
    of them is made.
    """
    wanted: WantedPositions | None = None

    @property
    def num_new(self) -> int:
        return self.num_known + len(self.guesses)

    def input_ids(self, rows: RowColumns) -> bytes | memoryview:
        """Return the packed ids [num_new] of the row: those the host knows, FUTURE for those still in flight,
        the guesses. They may be a view of the row's tokens.
        """
        ids: bytes | memoryview
        end, num_tokens = self.start + self.num_known, rows.num_tokens.item(self.row)
        if end <= num_tokens:
            ids = rows.packed(self.row, self.start, end)
        elif self.num_known == 1:
            ids = ONE_FUTURE
        else:
            known = rows.packed(self.row, self.start, num_tokens)
            ids = b"".join((known, ONE_FUTURE * (end - num_tokens)))
        # pack_ids takes three times as long for so few.
        return b"".join((ids, array("i", self.guesses))) if self.guesses else ids
