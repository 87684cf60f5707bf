"""ArrivedOutput: output of one sequence that has arrived, and the request that continues it after a
restart.
"""

from __future__ import annotations

import msgspec
import numpy as np

from runtime.wire.format import TOKEN_BYTES, unpack_floats
from runtime.wire.handle import MAX_ATTEMPT, attempt_of, sibling, with_attempt
from runtime.wire.messages import GenerateRequest, Resume, SequenceOutput
from runtime.wire.perf_metrics import Stamp

LOGPROB_BYTES = 2 * TOKEN_BYTES
"""Bytes of a token's id and its logprob."""


class ArrivedOutput:
    """Output of one sequence that has arrived, whether or not its caller has received it. The session records
    it, in its own thread, and submits the sequence again from it.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_num_forgotten",
        "_num_noted",
        "_num_prompt_logprobs",
        "_per_token",
        "_resumed_at",
        "_trace",
        "handle",
        "ids",
        "index",
        "is_open",
        "num_noted_chars",
    )

    def __init__(self, request: GenerateRequest, index: int, *, wants_logprobs: bool) -> None:
        self.index = index
        self.handle = sibling(request.handle, index)
        """Handle of the newest attempt."""
        self.is_open = True
        """True while it has no terminal message."""
        self.ids = bytearray()
        """Packed output ids that have arrived."""
        self.num_noted_chars = 0
        """Number of characters of text that have arrived."""
        self._num_prompt_logprobs = 0
        self._cumulative_logprob = 0.0
        self._trace = request.trace
        """Trace with its attempts, if it is sampled."""
        self._resumed_at = (0, 0)
        """Bytes of output and prompt logprobs that had arrived when its newest attempt was submitted."""
        self._num_noted = 0
        """Number of logprobs that have arrived."""
        self._num_forgotten = 0
        """Number of logprobs that were received and forgotten."""
        num_top = request.sampling.logprobs if wants_logprobs else None
        num_prompt_top = request.sampling.prompt_logprobs if index == 0 else None
        self._per_token = (_num_entries(num_top), _num_entries(num_prompt_top))
        """Number of logprobs of each token of the output, and of the prompt."""

    def note_logprobs(self, output: SequenceOutput) -> None:
        """Record the logprobs of an output that has arrived."""
        of_output, of_prompt = self._per_token
        num_prompt = len(output.prompt_logprobs) // TOKEN_BYTES
        self._num_prompt_logprobs += num_prompt
        self._num_noted += of_output * (len(output.logprobs) // TOKEN_BYTES) + of_prompt * num_prompt
        if output.logprobs:
            # Added one by one in float64, as the detokenizer does, so that the sum has the same bits.
            values = unpack_floats(output.logprobs).astype(np.float64)
            for value in values.tolist():
                self._cumulative_logprob += value

    @property
    def num_logprob_bytes(self) -> int:
        """Number of bytes of its logprobs that are kept: all that have arrived and were not forgotten."""
        return LOGPROB_BYTES * (self._num_noted - self._num_forgotten)

    def forget_logprobs(self, num_output: int, num_prompt: int) -> None:
        """Count the logprobs of so many tokens no longer: those of a delta that has been read."""
        of_output, of_prompt = self._per_token
        self._num_forgotten += of_output * num_output + of_prompt * num_prompt

    @property
    def is_with_scheduler(self) -> bool:
        """Return True if any output of the sequence's newest attempt has arrived. Output of an earlier
        attempt does not count, because the newest may have been lost on the way.
        """
        return (len(self.ids), self._num_prompt_logprobs) != self._resumed_at

    def next_attempt(
        self, request: GenerateRequest, time_limit_ms: int, now: float
    ) -> GenerateRequest | None:
        """Return the request that continues this sequence alone, under the handle of its next attempt; None
        if the number of attempts is exhausted.
        """
        attempt = attempt_of(self.handle) + 1
        if attempt > MAX_ATTEMPT:
            return None
        self.handle = with_attempt(self.handle, attempt)
        self._resumed_at = (len(self.ids), self._num_prompt_logprobs)
        if self._trace is not None:
            self._trace = self._trace.add(Stamp("attempt", now, attempt))
        resume = Resume(
            bytes(self.ids), self.num_noted_chars, self._cumulative_logprob, self._num_prompt_logprobs
        )
        return msgspec.structs.replace(
            request,
            handle=self.handle,
            sampling=request.sampling.of_sequence(self.index),
            time_limit_ms=time_limit_ms,
            resume=resume if any(self._resumed_at) else None,
            trace=self._trace,
        )


def _num_entries(num_top: int | None) -> int:
    """Return the number of logprobs of a token; None: none were asked for."""
    return 0 if num_top is None else 1 + num_top
