"""Results of a finished step for rows that are committed one by one, in the plan's order."""

from __future__ import annotations

from runtime.wire.format import FloatArray, IntArray, unpack_floats, unpack_ids
from runtime.wire.plan import PROCESSED_SCORES, StepResult
from runtime.wire.transport import Frame
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import PromptResult, RowLogprobs, Sampled, SampledLogits
from scheduler_proc.core.scheduled_row import ScheduledRow

CONTEXT = "context_"
"""Prefix in the names of tensors whose rows belong to the prompt."""
LOGITS = ("context_logits", "generation_logits", "embedding", PROCESSED_SCORES)
"""Names of tensors that are not additional outputs."""


class LooseResults:
    """Results of the loose rows of a batch. Take them in order, also those of rows that no longer
    want them.
    """

    def __init__(
        self, batch: ScheduleBatch, result: StepResult, tokens: IntArray, frames: tuple[Frame, ...]
    ) -> None:
        """tokens: sampled tokens of these rows."""
        self._step = result.step
        self._place = len(batch.order) - len(batch.loose)
        self._tokens: list[int] = tokens.tolist()
        num_rest = len(batch.order) - len(batch.decodes)
        self._counts = iter(unpack_ids(result.counts)[num_rest - len(batch.loose) :].tolist())
        self._chosen: FloatArray = unpack_floats(result.logprobs)
        shape = (len(self._chosen), result.num_top)
        self._top_ids: IntArray = unpack_ids(result.top_ids).reshape(shape)
        self._top: FloatArray = unpack_floats(result.top_logprobs).reshape(shape)
        self._token_at = 0
        self._logprob_at = 0
        self._prompts = {entry.index: entry for entry in result.prompts}
        self._errors = dict(result.errors)
        tensors: dict[str, dict[int, list[SampledLogits]]] = {name: {} for name in LOGITS}
        """Raw logits by tensor name and row."""
        self._context, self._generation, self._vectors, self._scores = (tensors[name] for name in LOGITS)
        self._outputs: dict[tuple[int, bool], list[tuple[str, SampledLogits]]] = {}
        """Additional outputs by (row, True if they belong to the prompt)."""
        for tensor, frame in zip(result.tensors, frames, strict=True):
            name, place, (num_rows, width) = tensor.name, tensor.index, tensor.shape
            logits = SampledLogits(tensor.start, num_rows, width, frame)
            if name in tensors:
                tensors[name].setdefault(place, []).append(logits)
            else:
                is_context = name.startswith(CONTEXT)
                self._outputs.setdefault((place, is_context), []).append((name, logits))

    def take_next(self, scheduled: ScheduledRow[Request]) -> tuple[Sampled, PromptResult | None]:
        """Return the results of the next loose row: those of its sample, and those of its prompt chunk or
        None.
        """
        place = self._place
        self._place += 1
        count = next(self._counts)
        ids = self._tokens[self._token_at : self._token_at + count]
        self._token_at += count
        logprobs = None
        if scheduled.req.num_logprobs >= 0:
            at = slice(self._logprob_at, self._logprob_at + count)
            self._logprob_at += count
            logprobs = RowLogprobs(self._chosen[at], self._top_ids[at], self._top[at])
        vectors = self._vectors.get(place)
        vector = None if vectors is None else vectors[0].frame
        logits, scores = self._generation.get(place, ()), self._scores.get(place, ())
        prompt = None if scheduled.wanted is None else self._prompt_result(place, scheduled)
        outputs = self._outputs.get((place, False), ()) if self._outputs else ()
        num_guesses, error = len(scheduled.guesses), self._errors.get(place, "")
        sampled = Sampled(ids, logprobs, vector, logits, outputs, self._step, num_guesses, error, scores)
        return sampled, prompt

    def _prompt_result(self, place: int, scheduled: ScheduledRow[Request]) -> PromptResult:
        wanted = scheduled.wanted
        assert wanted is not None
        logprobs, entry = None, self._prompts.get(place)
        if entry is not None:
            chosen = unpack_floats(entry.logprobs)
            shape = (len(chosen), -1)
            top_ids = unpack_ids(entry.top_ids).reshape(shape)
            top = unpack_floats(entry.top_logprobs).reshape(shape)
            logprobs = RowLogprobs(chosen, top_ids, top, entry.ranks)
        logits = self._context.get(place, ())
        outputs = self._outputs.get((place, True), ())
        return PromptResult(scheduled.start + wanted.first, wanted.num_positions, logprobs, logits, outputs)
