"""Records and messages of beam searches on the wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from runtime.wire.format import Count, Handle, Message, PackedIds, Record

MAX_HYPOTHESES = 64
FROM_THE_START = -1
"""Index of the empty output, which all hypotheses of a search start from."""


class BeamScore(Record, frozen=True):
    score: float
    """Score by which the hypotheses are ranked, the highest first."""
    logprob: float
    """Sum of the logprobs of the hypothesis' tokens."""


class HypothesisSoFar(Record, frozen=True):
    """Ids that a sequence of a beam search would have if the search ended now. The next ones may be quite
    different.
    """

    handle: Handle
    tokens: PackedIds
    """All token ids, including those of earlier messages."""


class BranchMatchers(Message, frozen=True):
    """Current hypotheses of a search, which replace the earlier ones. Each continues one of those, by index,
    or the empty output. Answered by BranchStates or GuideRefused.
    """

    handle: Handle
    num_tokens: Count
    """Number of output tokens of each hypothesis."""
    entries: Annotated[
        tuple[tuple[Annotated[int, Meta(ge=FROM_THE_START, lt=MAX_HYPOTHESES)], PackedIds], ...],
        Meta(max_length=MAX_HYPOTHESES),
    ]
    """Index of the hypothesis that each one continues, and its new ids, packed."""


class BranchStates(Message, frozen=True):
    handle: Handle
    num_tokens: Count
    masks: tuple[bytes, ...]
    """Bitmasks of what may follow each hypothesis; see MatcherState."""
    are_complete: tuple[bool, ...]
    """True for each hypothesis that may end here."""
