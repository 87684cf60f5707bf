"""Records of a beam search on the wire."""

from __future__ import annotations

from runtime.wire.format import Handle, PackedIds, Record


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
