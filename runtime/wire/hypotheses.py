"""Records of a beam search on the wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from runtime.wire.format import Count, Handle, Message, PackedIds, Record

MAX_HYPOTHESES = 64
FROM_THE_START = -1
"""Number of the matcher that has seen nothing, which all of a search begin with."""


class BeamScore(Record, frozen=True):
    score: float
    """Number by which the hypotheses of a beam search are ranked, the highest first."""
    logprob: float
    """Sum of the logprobs of the hypothesis's tokens."""


class HypothesisSoFar(Record, frozen=True):
    """Ids that a sequence of a search would have if it ended here; the next ones may be quite others."""

    handle: Handle
    tokens: PackedIds
    """All its token ids, also those that an earlier one had."""


class BranchMatchers(Message, frozen=True):
    """The hypotheses of a search by now, in the place of those before. Each goes on from one of those, by its
    number, or from the start. Answered by BranchStates, or a GuideRefused.
    """

    handle: Handle
    num_tokens: Count
    """Output tokens of each."""
    entries: Annotated[
        tuple[tuple[Annotated[int, Meta(ge=FROM_THE_START, lt=MAX_HYPOTHESES)], PackedIds], ...],
        Meta(max_length=MAX_HYPOTHESES),
    ]
    """Pairs of each: number of the one that it goes on from, and its new ids packed."""


class BranchStates(Message, frozen=True):
    handle: Handle
    num_tokens: Count
    masks: tuple[bytes, ...]
    """Bitmasks of what may follow in each hypothesis, as MatcherState's."""
    are_complete: tuple[bool, ...]
    """Tells of each whether it may end here."""
