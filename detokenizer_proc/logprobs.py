"""Logprobs of one sequence's prompt and output that are still to be sent, as packed columns."""

from __future__ import annotations

import numpy as np

from runtime.wire.format import TOKEN_BYTES, unpack_floats
from runtime.wire.messages import TokenLogprobs


class Columns:
    """Logprobs in packed columns, in their form on the wire."""

    __slots__ = ("logprobs", "ranks", "top_ids", "top_logprobs")

    def __init__(self) -> None:
        self.logprobs = bytearray()
        self.top_ids = bytearray()
        self.top_logprobs = bytearray()
        self.ranks = bytearray()

    @property
    def num_bytes(self) -> int:
        return len(self.logprobs) + len(self.top_ids) + len(self.top_logprobs) + len(self.ranks)

    def extend(self, record: TokenLogprobs, num_new: int) -> None:
        """Append the first `num_new` rows of a record, which has at least one."""
        num_in_record = len(record.logprobs) // TOKEN_BYTES
        top_bytes = len(record.top_ids) // num_in_record * num_new
        self.logprobs += record.logprobs[: num_new * TOKEN_BYTES]
        self.top_ids += record.top_ids[:top_bytes]
        self.top_logprobs += record.top_logprobs[:top_bytes]
        self.ranks += record.ranks[: num_new * TOKEN_BYTES]

    def clear(self) -> None:
        """Clear the logprobs that were sent."""
        self.logprobs.clear()
        self.top_ids.clear()
        self.top_logprobs.clear()
        self.ranks.clear()


class OutputLogprobs:
    """Log-probabilities of the output, in step with its token ids, and their sum."""

    __slots__ = ("_num_tokens", "columns", "cumulative")

    def __init__(self, num_tokens: int, cumulative: float) -> None:
        """Start after what an earlier attempt has delivered: num_tokens tokens whose logprobs sum to
        `cumulative`.
        """
        self._num_tokens = num_tokens
        self.cumulative = cumulative
        self.columns = Columns()

    def add(self, record: TokenLogprobs, num_tokens: int) -> None:
        """Append the logprobs up to output token number `num_tokens`. The sequence may have taken fewer
        tokens than the record has.
        """
        num_new = num_tokens - self._num_tokens
        num_in_record = len(record.logprobs) // TOKEN_BYTES
        assert num_new <= num_in_record, "tokens without logprobs in a sequence that has some"
        if num_new <= 0:
            return
        self._num_tokens = num_tokens
        self.columns.extend(record, num_new)
        chosen = unpack_floats(record.logprobs[: num_new * TOKEN_BYTES])
        self.cumulative += float(chosen.sum(dtype=np.float64))
