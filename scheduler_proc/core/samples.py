"""Results of a step for one row, in the form that features get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.wire.format import FloatArray, IntArray
from runtime.wire.transport import Frame


class RowLogprobs(NamedTuple):
    """Logprobs of some tokens of one row."""

    chosen: FloatArray
    """Logprobs [n] float32 of the tokens."""
    top_ids: IntArray
    """Ids [n, k] int32 of the k most likely tokens at each position, most likely first."""
    top: FloatArray
    """Logprobs [n, k] float32 of `top_ids`."""
    ranks: bytes = b""
    """Places [n] int32 of the tokens, packed as they came; of a prompt alone."""


class SampledLogits(NamedTuple):
    """Raw logits of consecutive positions of one row, or rows of an additional output."""

    start: int
    """Position in the sequence that the first row belongs to: of an input token, or of the sampled token."""
    num_positions: int
    vocab_size: int
    frame: Frame
    """Rows [num_positions, vocab_size] float32; for an additional output its width instead of vocab_size."""

    def upto(self, end: int) -> SampledLogits | None:
        """Return the part before position `end`, or None if nothing is left. Copies nothing."""
        keep = end - self.start
        if keep >= self.num_positions:
            return self
        if keep <= 0:
            return None
        num_bytes = memoryview(self.frame).nbytes * keep // self.num_positions
        return self._replace(num_positions=keep, frame=memoryview(self.frame).cast("B")[:num_bytes])


class Sampled(NamedTuple):
    """Result of a step for one row. When features get it, it is cut at stop ids and limits, and
    never empty.
    """

    ids: list[int]
    logprobs: RowLogprobs | None = None
    vector: Frame | None = None
    """Vector [hidden_size] float32 of an embedding model, whose ids mean nothing."""
    logits: Sequence[SampledLogits] = ()
    """Raw logits from the position of the first of `ids` on, possibly of more positions than there are ids.
    """
    outputs: Sequence[tuple[str, SampledLogits]] = ()
    """Rows of additional outputs with their tensor names, for the token before each of those positions."""
    step: int = 0
    """Number of the step."""
    num_guesses: int = 0
    """Number of guesses that were verified. `ids` has the accepted ones and one more."""
    error: str = ""
    """Reason why `ids` is invalid; empty if it is valid."""
    scores: Sequence[SampledLogits] = ()
    """One row of scores that logits processors have made from the logprobs of a beam."""


class PromptResult(NamedTuple):
    """Results of a prompt chunk at the positions that were asked for."""

    start: int
    """Position in the prompt of the first of these rows."""
    num_positions: int
    logprobs: RowLogprobs | None
    """Logprobs of the prompt token that follows each position; meaningless for the last position of the
    prompt.
    """
    logits: Sequence[SampledLogits]
    outputs: Sequence[tuple[str, SampledLogits]] = ()
    """Rows of additional outputs with their tensor names."""
