"""BadWords: forbids the last id of a word where the word's other ids are the end of the context."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from model_worker.sampling.capabilities.base import SamplerContext, SamplingCapability
from model_worker.sampling.capabilities.token_history import TokenHistory
from model_worker.sampling.forbid import NO_ID, Forbidden, by_owner
from model_worker.sampling.row_table import PADDING, RowTable
from model_worker.sampling.step import SamplingStep, StepRows
from runtime.sampling.features import BAD_WORDS
from runtime.wire.format import unpack_ids
from runtime.wire.plan import RowSetup


class BadWords(SamplingCapability):
    """Forbids banned words. words [max_rows, num_words, width] int32, reversed: a word's last id, then the
    ids before it.
    """

    bits = BAD_WORDS

    def __init__(self, context: SamplerContext, history: TokenHistory) -> None:
        super().__init__(context)
        self._history = history
        self._words = RowTable(context.max_rows, context.device)
        self._shapes = np.zeros((context.max_rows, 2), np.int64)

    def open_row(self, setup: RowSetup) -> None:
        """Store the words of a row. Words with an id outside the vocabulary are ignored."""
        known = self._context.columns.known
        words = [word for word in map(unpack_ids, setup.bad_words) if known(word).all()]
        width = max(map(len, words), default=0)
        backwards = np.full((len(words), width), PADDING, np.int32)
        for line, word in zip(backwards, words, strict=True):
            line[: len(word)] = word[::-1]
        self._shapes[setup.row] = backwards.shape
        self._words.put(setup.row, backwards)

    def find(self, step: SamplingStep) -> Forbidden | None:
        """Return the ids that would complete a word."""
        wary = step.rows_with(BAD_WORDS)
        return by_owner(wary.at, self._last_ids(wary))

    def _last_ids(self, wary: StepRows) -> Tensor:
        """Return ids [n, num_words] int64 that would complete a word of the rows, or NO_ID."""
        num_words, width = self._shapes[wary.rows_host].max(axis=0).tolist()
        rows = wary.rows
        if not num_words:
            return rows.new_empty((len(wary), 0))
        words = self._words.take(rows, num_words, width)
        last_ids = words[:, :, 0].long()
        if width == 1:
            return last_ids
        before = words[:, :, 1:]
        newest = self._history.newest(rows, wary.positions, width - 1).unsqueeze(1)
        begun = ((before == newest) | (before == PADDING)).all(dim=2)
        return last_ids.masked_fill_(~begun, NO_ID)
