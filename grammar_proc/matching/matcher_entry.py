"""MatcherEntry: all that is kept about one guided sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from grammar_proc.backend import Matcher
from grammar_proc.guides.guide_memory import GuideCopy
from runtime.base.errors import InvalidRequest
from runtime.base.mask_memory import MaskMemory
from runtime.ring.suspects.in_hand import at_work
from runtime.ring.suspects.roster import GUESSES
from runtime.wire.format import TOKEN_BYTES

LONG_OUTPUT = 64
"""Number of ids from which an output that has to be followed from its start is followed by itself."""


class MaskPlace(NamedTuple):
    """Slots of one sequence, for the mask of its next token and those after its guesses."""

    memory: MaskMemory
    slot: int
    num_slots: int = 1


@dataclass(slots=True, eq=False)
class MatcherEntry:
    """A guided sequence, and the position of its output in its guide."""

    copy: GuideCopy | None
    """The guide that it follows; None: it waits for another copy."""
    ids: bytearray
    """Output, packed."""
    place: MaskPlace | None
    """Slots in which its masks are written; None: masks are sent."""
    shown: bytes = b""
    """Its place in the roster while its output is in hand."""
    tenant: str = ""
    matcher: Matcher | None = None
    """None: the output has yet to be followed."""
    num_new: int = 0
    """Number of the last ids that the matcher has yet to follow."""
    is_due: bool = False
    """True if its state has to be sent as soon as it has a copy."""
    num_moves: int = 0
    refusal: InvalidRequest | None = None
    """Error of a guide that does not allow the output from which it began."""
    excess_s: float = 0.0
    guesses: bytes = b""
    """Ids [n] int32, packed: the guesses that a step verifies after its tokens."""
    guess_excess_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // TOKEN_BYTES

    @property
    def is_behind(self) -> bool:
        """Return True if the output has to be followed before the mask is made."""
        return self.matcher is None or self.num_new > 0

    @property
    def shown_now(self) -> bytes:
        """Its place in the roster while its state is made."""
        return at_work(self.shown, GUESSES) if self.guesses else self.shown

    @property
    def is_long_to_follow(self) -> bool:
        return self.matcher is None and self.num_tokens >= LONG_OUTPUT
