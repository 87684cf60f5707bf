"""Results of a step for one row, as features see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.wire.format import FloatArray, IntArray
from runtime.wire.transport import Frame


class RowLogprobs(NamedTuple):
    """Logprobs of some tokens of one row."""

    chosen: FloatArray
    """Logprobs [n] float32 of the tokens themselves."""
    top_ids: IntArray
    """Ids [n, k] int32 of the k most likely tokens in the place of each, most likely first."""
    top: FloatArray
    """Logprobs [n, k] float32 of `top_ids`."""


class SampledLogits(NamedTuple):
    """Raw logits of consecutive positions of one row, or its rows of an additional output."""

    start: int
    """Position in the sequence of the first row: of an input token, or of the sampled token."""
    num_positions: int
    vocab_size: int
    frame: Frame
    """Rows [num_positions, vocab_size] float32, or of the width of the additional output."""

    def upto(self, end: int) -> SampledLogits | None:
        """Return them without the positions from `end` on; None when nothing is left. Copies nothing."""
        keep = end - self.start
        if keep >= self.num_positions:
            return self
        if keep <= 0:
            return None
        num_bytes = memoryview(self.frame).nbytes * keep // self.num_positions
        return self._replace(num_positions=keep, frame=memoryview(self.frame).cast("B")[:num_bytes])


class Sampled(NamedTuple):
    """Result of a step for one row. That which features see is cut at stop ids and limits, never empty."""

    ids: list[int]
    logprobs: RowLogprobs | None = None
    vector: Frame | None = None
    """Vector [hidden_size] float32 of an embedding model; then the id means nothing."""
    logits: Sequence[SampledLogits] = ()
    """Raw logits of the positions from that of the first of `ids` on; maybe of more than there are ids."""
    outputs: Sequence[tuple[str, SampledLogits]] = ()
    """Rows of additional outputs, with their tensors' names, of the token before each of those positions."""
    step: int = 0
    """Number of the step."""
    num_guesses: int = 0
    """Number of guesses that were verified; `ids` has those that were right, and one more."""
    error: str = ""
    """Reason why `ids` counts for nothing; empty where it counts."""
    scores: Sequence[SampledLogits] = ()
    """Scores that logits processors have left of the logprobs of a row of a beam search, one row of them."""


class PromptResult(NamedTuple):
    """Results of a chunk of prompt at the positions that were asked for."""

    start: int
    """Position of the first of these rows in the prompt."""
    num_positions: int
    logprobs: RowLogprobs | None
    """Logprobs of the prompt's token after each position; of its last position meaningless."""
    logits: Sequence[SampledLogits]
    outputs: Sequence[tuple[str, SampledLogits]] = ()
    """Rows of additional outputs, with their tensors' names."""
