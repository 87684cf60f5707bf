"""Prohibitions: ids that a row may not sample next, because of a list or because of what came before.

Two kinds. What the allowed ids do not name is forbidden always. Min tokens, bad words and n-grams yield where
they would leave nothing of what the allowed ids and the mask leave: then they forbid nothing for this token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling.columns import FeatureArray, LongArray, SampleRows, SamplingColumns, rows_with
from model_worker.sampling.row_table import PADDING, RowTable
from runtime.sampling import features as bit
from runtime.wire.format import IntArray, unpack_ids
from runtime.wire.plan import RowSetup

NO_TOKEN = -1
NO_ID = -1
# Which row of logits, and which of its ids is forbidden, NO_ID for none: [N] int64 each.
Forbidden = tuple[Tensor, Tensor]


class TokenHistory:
    """tokens [max_rows, max_len] int32: prompt and output, NO_TOKEN for ids that the vocabulary lacks.

    Allocated with the first need: most runs never need it. A token is added on the stream that samples it, so
    the next step sees it whether or not the host does. How long a row's history is, its caller knows: as long
    as the position of the token to be sampled. What lies beyond is an earlier tenant's.
    """

    def __init__(self, max_rows: int, max_len: int, device: Device) -> None:
        self._shape = (max_rows, max_len)
        self._device = device
        self._tokens: Tensor | None = None

    def open_row(self, row: int, ids: IntArray) -> None:
        """Begin a stay with prompt and output so far."""
        if self._tokens is None:
            self._tokens = torch.full(
                self._shape, NO_TOKEN, dtype=torch.int32, device=self._device.torch_device
            )
        self._tokens[row, : len(ids)] = self._device.tensor(ids.astype(np.int32))

    def append(self, rows: Tensor, positions: Tensor, tokens: Tensor, positions_host: LongArray) -> None:
        """Add one sampled token for each of rows [n], which differ, at positions [n]; all int64."""
        assert self._tokens is not None
        assert int(positions_host.max()) < self._shape[1], "a token beyond the longest sequence"
        self._tokens[rows, positions] = tokens.int()

    def beginning(self, rows: Tensor, length: int) -> Tensor:
        """The first `length` tokens of rows [n]: [n, length] int32."""
        assert self._tokens is not None
        return self._tokens[:, :length].index_select(0, rows)

    def newest(self, rows: Tensor, lengths: Tensor, count: int) -> Tensor:
        """The last `count` tokens of rows [n] of lengths [n], the newest first: [n, count] int32; NO_TOKEN
        before the beginning.
        """
        assert self._tokens is not None
        at = lengths.unsqueeze(1) - 1 - torch.arange(count, device=lengths.device)
        tokens = self._tokens[rows.unsqueeze(1), at.clamp_min(0)]
        return tokens.masked_fill_(at < 0, NO_TOKEN)


class AllowedIds:
    """forbidden [max_rows, vocab_size] bool: all but the allowed ids. Allocated with the first need."""

    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        self._shape = (max_rows, vocab_size)
        self._device = device
        self._forbidden: Tensor | None = None

    def open_row(self, row: int, ids: IntArray) -> None:
        if self._forbidden is None:
            self._forbidden = torch.zeros(self._shape, dtype=torch.bool, device=self._device.torch_device)
        forbidden = self._forbidden[row]
        forbidden.fill_(True)
        forbidden.index_fill_(0, self._device.tensor(ids.astype(np.int64)), False)

    def apply(self, logits: Tensor, at: Tensor, rows: Tensor) -> None:
        """Forbid all else in logits[at], in place; at [n] and rows [n] int64."""
        assert self._forbidden is not None
        logits[at] = logits[at].masked_fill_(self._forbidden[rows], -math.inf)


class BadWords:
    """words [max_rows, num_words, width] int32, backwards: a word's last id, then the ids before it."""

    def __init__(self, max_rows: int, device: Device) -> None:
        self._words = RowTable(max_rows, device)
        self._shapes = np.zeros((max_rows, 2), np.int64)

    def open_row(self, row: int, words: Sequence[IntArray]) -> None:
        width = max(map(len, words), default=0)
        backwards = np.full((len(words), width), PADDING, np.int32)
        for line, word in zip(backwards, words, strict=True):
            line[: len(word)] = word[::-1]
        self._shapes[row] = backwards.shape
        self._words.put(row, backwards)

    def find(self, history: TokenHistory, rows: Tensor, lengths: Tensor, rows_host: LongArray) -> Tensor:
        """Ids [n, num_words] int64 that would complete a word of rows [n] after `lengths` [n] tokens, or
        NO_ID.
        """
        num_words, width = self._shapes[rows_host].max(axis=0).tolist()
        if not num_words:
            return rows.new_empty((len(rows_host), 0))
        words = self._words.take(rows, num_words, width)
        last_ids = words[:, :, 0].long()
        if width == 1:
            return last_ids
        before = words[:, :, 1:]
        newest = history.newest(rows, lengths, width - 1).unsqueeze(1)
        begun = ((before == newest) | (before == PADDING)).all(dim=2)
        return last_ids.masked_fill_(~begun, NO_ID)


def repeating_ids(history: Tensor, lengths: Tensor, sizes: Tensor, max_size: int) -> Tensor:
    """Ids [n, L] int64 that would complete an n-gram a second time, or NO_ID.

    history [n, L] int32, of which the first lengths [n] tokens count; sizes [n] int64 are those of the
    n-grams, max_size the largest. Token j is forbidden where the tokens before it equal the newest ones.
    """
    width = history.shape[1]
    at = torch.arange(width, device=history.device)
    found = (at < lengths.unsqueeze(1)) & (at >= sizes.unsqueeze(1) - 1)
    for k in range(1, min(max_size, width)):
        newest = history.gather(1, (lengths - k).clamp_min_(0).unsqueeze(1))
        same = history[:, : width - k] == newest
        found[:, k:].logical_and_(same | (sizes <= k).unsqueeze(1))
    return history.long().masked_fill_(~found, NO_ID)


class Prohibitions:
    def __init__(
        self, columns: SamplingColumns, *, max_rows: int, max_len: int, vocab_size: int, device: Device
    ) -> None:
        self._columns = columns
        self._device = device
        self._allowed_ids = AllowedIds(max_rows, vocab_size, device)
        self._bad_words = BadWords(max_rows, device)
        self._stop_ids = RowTable(max_rows, device)
        self.history = TokenHistory(max_rows, max_len, device)

    def open_row(self, setup: RowSetup, features: int) -> None:
        """Begin a stay. Ids that the vocabulary lacks are ignored, and so are words with such an id."""
        known = self._columns.known
        stop_ids = self._columns.known_ids(setup.stop_ids if features & bit.MIN_LEN else b"")
        self._stop_ids.put(setup.row, stop_ids.reshape(1, -1))
        if features & bit.ALLOWED:
            self._allowed_ids.open_row(setup.row, self._columns.known_ids(setup.allowed_ids))
        if features & bit.BAD_WORDS:
            words = [unpack_ids(word) for word in setup.bad_words]
            self._bad_words.open_row(setup.row, [word for word in words if known(word).all()])
        if features & bit.HISTORY:
            ids = unpack_ids(setup.history_ids)
            self.history.open_row(setup.row, np.where(known(ids), ids, NO_TOKEN))

    def apply_allowed_ids(self, logits: Tensor, who: SampleRows, features: FeatureArray) -> None:
        """Forbid in logits [S, V] in place what the rows' allowed ids do not name."""
        at = self._device.tensor(rows_with(features, bit.ALLOWED))
        self._allowed_ids.apply(logits, at, who.rows[at])

    def apply(self, logits: Tensor, who: SampleRows, features: FeatureArray, *, may_empty: bool) -> None:
        """Min tokens, bad words and n-grams on logits [S, V] in place. may_empty: whether ids are forbidden
        already, so that even min tokens might leave nothing.
        """
        may_empty = may_empty or bool((features & (bit.BAD_WORDS | bit.NGRAM)).any())
        if logits.is_cuda and not may_empty:
            self.forbid_stops_by_kernel(logits, who)
            return
        found = [
            *self._stops(who, features),
            *self._ends_of_words(who, features),
            *self._ends_of_ngrams(who, features),
        ]
        if not found:
            return
        owners, ids = (torch.cat(parts) for parts in zip(*found, strict=True))
        rescued = self._device.tensor(rows_with(features, bit.FORBIDS)) if may_empty else None
        forbid(logits, owners, ids, rescued)

    def forbid_stops_by_kernel(self, logits: Tensor, who: SampleRows) -> None:
        """Min tokens alone, of all rows in one launch."""
        from model_worker.sampling.triton.logit_edits import forbid_below

        forbid_below(logits, who.rows, who.positions, self._stop_ids.values, self._columns.min_len)

    def _stops(self, who: SampleRows, features: FeatureArray) -> list[Forbidden]:
        c = self._columns
        short = rows_with(features, bit.MIN_LEN)
        short = short[who.positions_host[short] < c.host["min_len"][who.rows_host[short]]]
        if not len(short):
            return []
        at = self._device.tensor(short)
        return [_by_owner(at, self._stop_ids.take(who.rows[at])[:, 0].long())]

    def _ends_of_words(self, who: SampleRows, features: FeatureArray) -> list[Forbidden]:
        wary = rows_with(features, bit.BAD_WORDS)
        if not len(wary):
            return []
        at = self._device.tensor(wary)
        ids = self._bad_words.find(self.history, who.rows[at], who.positions[at], who.rows_host[wary])
        return [_by_owner(at, ids)]

    def _ends_of_ngrams(self, who: SampleRows, features: FeatureArray) -> list[Forbidden]:
        wary = rows_with(features, bit.NGRAM)
        if not len(wary):
            return []
        at = self._device.tensor(wary)
        rows = who.rows[at]
        history = self.history.beginning(rows, int(who.positions_host[wary].max()))
        sizes = self._columns.host["ngram"][who.rows_host[wary]]
        found = repeating_ids(history, who.positions[at], self._device.tensor(sizes), int(sizes.max()))
        return [_by_owner(at, found)]


def _by_owner(at: Tensor, ids: Tensor) -> Forbidden:
    """ids [n, k] of rows at [n], one by one."""
    return at.unsqueeze(1).expand_as(ids).flatten(), ids.flatten()


def forbid(logits: Tensor, owners: Tensor, ids: Tensor, rescued: Tensor | None) -> None:
    """logits[owners[i], ids[i]] = -inf, in place; but of the rows `rescued` [n], those that would be left
    without a finite logit stay as they are. owners, ids [N], rescued int64; an id may be NO_ID.
    """
    flat = logits.view(-1)
    index = owners * logits.shape[1] + ids.clamp_min(0)
    before = None if rescued is None else flat[index]
    # A minimum, not an assignment: an index may come several times, and NO_ID changes nothing.
    flat.scatter_reduce_(0, index, torch.where(ids >= 0, -math.inf, math.inf), "amin")
    if before is None or rescued is None:
        return
    empty = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    empty[rescued] = logits[rescued].amax(dim=1) == -math.inf
    flat.scatter_reduce_(0, index, before.masked_fill_(~empty[owners], -math.inf), "amax")
