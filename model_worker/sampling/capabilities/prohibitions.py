"""Prohibitions: min tokens, bad words and n-grams, which yield together. Where they would leave no id of
those that allowed ids and mask leave, they forbid nothing for this token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.sampling.capabilities.bad_words import BadWords
from model_worker.sampling.capabilities.base import SamplerContext, SamplingCapability
from model_worker.sampling.capabilities.min_tokens import MinTokens
from model_worker.sampling.capabilities.ngrams import NGrams
from model_worker.sampling.capabilities.token_history import TokenHistory
from model_worker.sampling.forbid import forbid
from model_worker.sampling.step import MASKED, SamplingStep, StepSample
from runtime.sampling.features import ALLOWED, BAD_WORDS, FORBIDS, HISTORY, NGRAM
from runtime.wire.plan import RowSetup

MAY_EMPTY = ALLOWED | MASKED | BAD_WORDS | NGRAM
"""Features with which even min tokens might leave no id of a row."""


class Prohibitions(SamplingCapability):
    bits = FORBIDS
    remembered = HISTORY

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        self._history = TokenHistory(context)
        self._min_tokens = MinTokens(context)
        self._found_by = (
            self._min_tokens,
            BadWords(context, self._history),
            NGrams(context, self._history),
        )

    def open_row(self, setup: RowSetup) -> None:
        """Begin a stay of a row that needs this. See SamplingCapability."""
        features = self._context.columns.features.item(setup.row)
        for part in (self._history, *self._found_by):
            if features & part.bits:
                part.open_row(setup)

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Change logits [S, V] float32 in place, before the draw."""
        if not step.present & MAY_EMPTY:
            self._min_tokens.apply(logits, step)
            return
        found = [part.find(step) for part in self._found_by if step.present & part.bits]
        each = [forbidden for forbidden in found if forbidden is not None]
        if each:
            owners, ids = (torch.cat(parts) for parts in zip(*each, strict=True))
            forbid(logits, owners, ids, step.rows_with(FORBIDS).at)

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """Record the drawn tokens; see SamplingCapability.remember."""
        self._history.remember(step, sampled)

    def close_row(self, row: int) -> None:
        """End the stay of a row's holder. See SamplingCapability."""
        features = self._context.columns.features.item(row)
        for part in self._found_by:
            if features & part.bits:
                part.close_row(row)
