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
from scheduler_proc.port import Readiness

R = TypeVar("R")
"""Type of the request. Features see the row but not the type."""

FUTURE = -1
"""Input id that stands for a token that only the device knows, in FutureMap[row]."""
ONE_FUTURE = array("i", [FUTURE]).tobytes()


class NoMask(Enum):
    """Reason why no mask is made for a row that needs one."""

    LATE = "late"
    """The mask is not there in time. The token cannot be sampled now, so the row sits out until the feature
    is ready, and computes the step again then.
    """
    COMPLETE = "complete"
    """No mask is needed: the output is already complete."""


MakeMasks: TypeAlias = Callable[[int], Sequence[bytes | int] | NoMask]
"""Function that makes bitmasks of allowed ids, or says why there are none. It is called when every earlier
step is committed, with the number of guesses. The first mask is for the next token, the others for the
positions behind the guesses, as far as a token sampled there can count. Raises RequestError to end the
request.
"""


class WantedPositions(NamedTuple):
    """Positions of a chunk whose logits are wanted: PromptPositions without the index of its row."""

    first: int
    targets: bytes
    num_logprobs: int
    returns_logits: bool
    returns_outputs: bool = False

    @property
    def num_positions(self) -> int:
        return len(self.targets) // TOKEN_BYTES


class ScheduledRow(msgspec.Struct, Generic[R], eq=False, gc=False):
    """A row that is more than a plain decode: a chunk of prefill, or a row with features."""

    req: R
    row: int
    start: int
    num_known: int
    """Number of the request's own new tokens, without guesses."""
    samples: bool
    is_prefill: bool
    guesses: Sequence[int] = ()
    """Guessed ids to verify behind the request's own tokens."""
    make_masks: MakeMasks | None = None
    note_guesses: Callable[[Sequence[int]], None] | None = None
    """Called with the guesses that are verified, before masks are asked for. A row with masks has no guesses
    without it.
    """
    masked_by: Readiness | None = None
    """Tells whether the row's next masks are there. A row whose masks are late sits out until they are."""
    sits_out: bool = False
    """True if the row also sits out after a step whose masks were there in time."""
    is_on_trial: bool = False
    """True if the step waits for the row's masks only while the worker computes."""
    unseen: Callable[[], ProcessedRow] | None = None
    """Returns the tokens that its logits processors have not seen. Called when masks are asked for. None: its
    processors are not called.
    """
    wanted: WantedPositions | None = None

    @property
    def num_new(self) -> int:
        return self.num_known + len(self.guesses)

    def input_ids(self, rows: RowColumns) -> bytes | memoryview:
        """Return the packed input ids [num_new]: ids known to the host, FUTURE for those in flight, then
        guesses. May be a view of the row's tokens.
        """
        ids: bytes | memoryview
        end, num_tokens = self.start + self.num_known, rows.num_tokens_of[self.row]
        if end <= num_tokens:
            ids = rows.packed(self.row, self.start, end)
        elif self.num_known == 1:
            ids = ONE_FUTURE
        else:
            known = rows.packed(self.row, self.start, num_tokens)
            ids = b"".join((known, ONE_FUTURE * (end - num_tokens)))
        # pack_ids takes three times as long for so few.
        return b"".join((ids, array("i", self.guesses))) if self.guesses else ids
