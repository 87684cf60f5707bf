"""PromptOutputs: sends logprobs, raw logits and additional outputs of a prompt to the client, each position
once.

A position is done when its step is committed. A retracted request continues with the first position that is
not. Until all are done, `Request.wanted_from` keeps the request from taking those positions from the prefix
cache. The pages that it computes are published like any other prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from runtime.wire.format import TOKEN_BYTES, pack_ids
from runtime.wire.messages import TensorEntry, TokenLogprobs
from scheduler_proc.core.request import NOTHING_WANTED, Request
from scheduler_proc.core.samples import PromptResult, RowLogprobs
from scheduler_proc.core.scheduled_row import ScheduledRow, WantedPositions
from scheduler_proc.features.base import EmitTensor, RequestFeature

EmitLogprobs: TypeAlias = Callable[[TokenLogprobs], None]


class PromptOutputs(RequestFeature):
    """Feature of a request that wants logprobs, raw logits or additional outputs of its prompt."""

    def __init__(self, req: Request, emit_logprobs: EmitLogprobs, emit_tensor: EmitTensor) -> None:
        self._req = req
        self._emit_logprobs = emit_logprobs
        self._emit_tensor = emit_tensor
        # Output is delivered after all rows of the prompt, so a request that resumes with output has those
        # already.
        self._wants_logits = req.sampling.return_context_logits and not req.num_output
        self._wants_outputs = wants_context(req) and not req.num_output
        wants_rows = self._wants_logits or self._wants_outputs
        self._num_logprobs = -1 if req.sampling.prompt_logprobs is None else req.sampling.prompt_logprobs
        # The last position has logits, but no next token of the prompt to give a logprob for.
        self._end = req.num_prompt if wants_rows else req.num_prompt - 1
        self._first = req.sampling.prompt_logprobs_start + req.num_prompt_logprobs
        """First position whose logprob is wanted and was not delivered by an earlier attempt."""
        self._done_upto(0 if wants_rows else self._first)

    def _done_upto(self, position: int) -> None:
        self._req.wanted_from = position if position < self._end else NOTHING_WANTED

    def plan_chunk(self, row: ScheduledRow[Any]) -> None:
        req, end = self._req, row.start + row.num_known
        first = max(row.start, req.wanted_from)
        if first >= min(end, self._end):
            return
        targets = req.tokens[first + 1 : min(end + 1, req.num_prompt)].tobytes()
        if end == req.num_prompt:
            targets += pack_ids([0])
        row.wanted = WantedPositions(
            first - row.start, targets, self._num_logprobs, self._wants_logits, self._wants_outputs
        )

    def accept_prompt(self, result: PromptResult) -> None:
        if result.logprobs is not None:
            self._deliver(result.start, result.logprobs)
        for start, num_positions, vocab_size, frame in result.logits:
            shape = (num_positions, vocab_size)
            entry = TensorEntry(self._req.handle, "context_logits", "float32", shape, start)
            self._emit_tensor(entry, frame)
        for name, (start, num_positions, width, frame) in result.outputs:
            shape = (num_positions, width)
            self._emit_tensor(TensorEntry(self._req.handle, name, "float32", shape, start), frame)
        self._done_upto(result.start + result.num_positions)

    def _deliver(self, start: int, got: RowLogprobs) -> None:
        """Send the logprobs, except those that are not wanted or were delivered before, and except that of
        the last position.
        """
        req = self._req
        first = max(0, self._first - start)
        end = min(len(got.chosen), req.num_prompt - 1 - start)
        if first < end:
            self._emit_logprobs(
                TokenLogprobs(
                    req.handle,
                    got.chosen[first:end].tobytes(),
                    got.top_ids[first:end].tobytes(),
                    got.top[first:end].tobytes(),
                    got.ranks[TOKEN_BYTES * first : TOKEN_BYTES * end],
                )
            )


def wants_context(req: Request) -> bool:
    """Return True if a request wants additional outputs of its prompt."""
    return bool(req.sampling.additional_outputs) and req.sampling.gather_context


def attach_prompt_outputs(
    emit_logprobs: EmitLogprobs, emit_tensor: EmitTensor
) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that gives PromptOutputs to each request that still has some to get."""

    def attach(req: Request) -> RequestFeature | None:
        sampling = req.sampling
        wants_rows = sampling.return_context_logits or (sampling.additional_outputs and wants_context(req))
        if sampling.prompt_logprobs is None and not wants_rows:
            return None
        feature = PromptOutputs(req, emit_logprobs, emit_tensor)
        return None if req.wanted_from == NOTHING_WANTED else feature

    return attach
