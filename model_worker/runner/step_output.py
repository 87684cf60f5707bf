"""Results of a step: before sampling, and then as tensors and as a StepResult for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.runner.prompt_positions import FLOAT_BYTES, PromptOutput
from model_worker.runner.sampled_places import has_drafts, sampled_places
from model_worker.runner.taps import TappedRows
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.guesses import places_that_count
from model_worker.sampling.logprobs import Logprobs
from runtime.wire.format import TOKEN_BYTES, LongArray, pack_ids, unpack_ids
from runtime.wire.plan import PROCESSED_SCORES, BatchPlan, ChunkLogprobs, StepResult, StepTensor

if TYPE_CHECKING:  # a step is measured where ZMQ need not be installed
    from runtime.wire.transport import Frame

# Bytes of one message part; a receiver handles other messages in between.
MAX_FRAME_BYTES = 16 << 20


@dataclass(slots=True)
class ForwardOutput:
    """State of a step between forward and sampling."""

    logits: Tensor  # [S, vocab_size] float32; on rank 0 alone
    sample_rows: SampleRows
    prompt: PromptOutput | None = None
    draw: Callable[[], Tensor | None] | None = None
    """Draws tokens [S] int64, if a draw was recorded with the step. Stored for plans that contain -1, but
    with guesses not the right ones. Returns None if rows need more than a draw, or another rank samples.
    """
    tokens: bytes | None = None  # packed ids, when they have been drawn and remembered
    tapped: TappedRows | None = None


@dataclass(slots=True)
class StepOutput:
    """Results of S sampled tokens, on the device until `on_host`. With guesses, some of them are
    not valid.
    """

    tokens: Tensor | bytes  # [S] int32; packed where they are on the host already
    logprobs: Logprobs | None = None  # [m], of the rows that asked
    logprobs_of: LongArray | None = None  # [m] which of S they belong to
    logits: Tensor | None = None  # [m, V] float32, raw, of the rows that asked
    logits_of: LongArray | None = None  # [m] which of S they belong to
    scores: Tensor | None = None  # [m, V] float32, that logits processors left of rows of beam searches
    scores_of: LongArray | None = None  # [m] which of S they belong to
    prompt: PromptOutput | None = None
    embeddings: Tensor | None = None  # [S, hidden_size] float32, of an embedding model
    errors: Sequence[tuple[int, str]] = ()  # which of S have no token, and why
    tapped: TappedRows | None = None

    def on_host(self, device: Device) -> StepOutput:
        """Start the copies to the host, which may be read when the calling work is done."""
        if isinstance(self.tokens, bytes):  # of a step that has nothing else
            return self
        prompt = self.prompt
        if prompt is not None and prompt.logprobs is not None:
            prompt = replace(prompt, logprobs=_downloaded(prompt.logprobs, device))
        return StepOutput(
            tokens=device.download(self.tokens),
            logprobs=None if self.logprobs is None else _downloaded(self.logprobs, device),
            logprobs_of=self.logprobs_of,
            logits=None if self.logits is None else device.download(self.logits),
            logits_of=self.logits_of,
            scores=None if self.scores is None else device.download(self.scores),
            scores_of=self.scores_of,
            prompt=prompt,
            embeddings=None if self.embeddings is None else device.download(self.embeddings),
            errors=self.errors,
            tapped=self.tapped,
        )

    def to_result(self, plan: BatchPlan) -> tuple[StepResult, tuple[Frame, ...]]:
        """Return the message and the raw frames behind it, from tensors on the host."""
        if has_drafts(plan):
            accepted, counts = self._accepted(plan)
            return accepted._to_result(plan, counts)
        # Without guesses a row that samples has one token, so the counts are what the plan says.
        return self._to_result(plan, plan.samples)

    def _accepted(self, plan: BatchPlan) -> tuple[StepOutput, bytes]:
        """Return the valid part of the results once guesses are verified, and the packed number of tokens of
        each row that is not a plain decode.
        """
        index, _, guesses = sampled_places(plan)
        tokens = unpack_ids(self.tokens) if isinstance(self.tokens, bytes) else self.tokens.numpy()
        kept = places_that_count(tokens, guesses)
        counts = np.bincount(index[kept], minlength=len(plan.rows) // TOKEN_BYTES)[plan.num_decodes :]
        accepted = replace(self, tokens=pack_ids(tokens[kept]))
        if self.logprobs is not None and self.logprobs_of is not None:
            some = torch.from_numpy(kept[self.logprobs_of])
            accepted.logprobs = Logprobs(*(each[some] for each in self.logprobs.parts))
        if self.logits is not None and self.logits_of is not None:
            accepted.logits_of = self.logits_of[kept[self.logits_of]]
            accepted.logits = self.logits[torch.from_numpy(kept[self.logits_of])]
        if self.scores is not None and self.scores_of is not None:
            accepted.scores_of = self.scores_of[kept[self.scores_of]]
            accepted.scores = self.scores[torch.from_numpy(kept[self.scores_of])]
        if self.tapped is not None:
            accepted.tapped = self.tapped.accepted(kept)
        return accepted, pack_ids(counts)

    def _to_result(self, plan: BatchPlan, counts: bytes) -> tuple[StepResult, tuple[Frame, ...]]:
        described = [*self._context_logits(plan), *self._sampled_rows(plan), *self._embeddings(plan)]
        if self.tapped is not None:
            rows = self.tapped.described(plan, MAX_FRAME_BYTES)
            described += [(tensor, _to_frame(values)) for tensor, values in rows]
        top = self.logprobs
        result = StepResult(
            step=plan.step,
            tokens=self.tokens if isinstance(self.tokens, bytes) else _to_bytes(self.tokens),
            counts=counts,
            logprobs=b"" if top is None else _to_bytes(top.chosen),
            num_top=0 if top is None else top.top_ids.shape[1],
            top_ids=b"" if top is None else _to_bytes(top.top_ids),
            top_logprobs=b"" if top is None else _to_bytes(top.top),
            prompts=tuple(self._prompt_logprobs(plan)),
            tensors=tuple(tensor for tensor, _ in described),
            errors=self._errors_by_row(plan) if self.errors else (),
        )
        return result, tuple(frame for _, frame in described)

    def _errors_by_row(self, plan: BatchPlan) -> tuple[tuple[int, str], ...]:
        index, _, _ = sampled_places(plan)
        return tuple((index.item(place), error) for place, error in self.errors)

    def _prompt_logprobs(self, plan: BatchPlan) -> Iterator[ChunkLogprobs]:
        if self.prompt is None or self.prompt.logprobs is None:
            return
        scored = self.prompt.logprobs
        assert scored.ranks is not None
        start = 0
        for entry in plan.prompt_positions:
            end = start + len(entry.targets) // TOKEN_BYTES
            if entry.num_logprobs >= 0:
                yield ChunkLogprobs(
                    index=entry.index,
                    logprobs=_to_bytes(scored.chosen[start:end]),
                    ranks=_to_bytes(scored.ranks[start:end]),
                    top_ids=_to_bytes(scored.top_ids[start:end, : entry.num_logprobs]),
                    top_logprobs=_to_bytes(scored.top[start:end, : entry.num_logprobs]),
                )
            start = end

    def _context_logits(self, plan: BatchPlan) -> Iterator[tuple[StepTensor, Frame]]:
        """Yield the raw logits of prompt positions in order, as many in a frame as fit."""
        if self.prompt is None or not self.prompt.logits:
            return
        starts = unpack_ids(plan.starts)
        for part in self.prompt.logits:
            entry = plan.prompt_positions[part.entry]
            start = starts.item(entry.index) + entry.first + part.first
            num_rows, vocab_size = part.logits.shape
            at_a_time = max(1, MAX_FRAME_BYTES // (FLOAT_BYTES * vocab_size))
            for low in range(0, num_rows, at_a_time):
                logits = part.logits[low : low + at_a_time]
                shape = (logits.shape[0], vocab_size)
                yield StepTensor(entry.index, "context_logits", start + low, shape), _to_frame(logits)

    def _sampled_rows(self, plan: BatchPlan) -> Iterator[tuple[StepTensor, Frame]]:
        """Yield the raw logits of sampled tokens, and scores that logits processors made for rows of beam
        searches.
        """
        for name, values, which in (
            ("generation_logits", self.logits, self.logits_of),
            (PROCESSED_SCORES, self.scores, self.scores_of),
        ):
            if values is None or which is None:
                continue
            index, position, _ = sampled_places(plan)
            shape = (1, values.shape[1])
            for n, at in enumerate(which.tolist()):
                tensor = StepTensor(index.item(at), name, position.item(at), shape)
                yield tensor, _to_frame(values[n : n + 1])

    def _embeddings(self, plan: BatchPlan) -> Iterator[tuple[StepTensor, Frame]]:
        if self.embeddings is None:
            return
        index, _, _ = sampled_places(plan)
        shape = (1, self.embeddings.shape[1])
        for n, at in enumerate(index.tolist()):
            yield StepTensor(at, "embedding", 0, shape), _to_frame(self.embeddings[n : n + 1])


def _downloaded(logprobs: Logprobs, device: Device) -> Logprobs:
    return Logprobs(*map(device.download, logprobs.parts))


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _to_frame(rows: Tensor) -> Frame:
    """Return the memory of contiguous rows without copying."""
    return rows.numpy().data.cast("B")
