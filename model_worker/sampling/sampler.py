"""Sampler: one token for each row of logits, in the order of docs/sampling.md.

    repetition → presence, frequency → logit bias, min tokens → mask → ÷ temperature → top-k → top-p → min-p
    → argmax(logit + Gumbel noise of (seed, position, id))

A step touches only the rows that need a feature; a batch of plain greedy rows is one argmax. A row's token
depends on its own logits, parameters and position, never on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling import columns as col
from model_worker.sampling.columns import SamplingColumns, rows_with, take
from model_worker.sampling.noise import noise_at, perturbed
from model_worker.sampling.penalties import PenaltyCounts
from model_worker.sampling.philox import LANES
from model_worker.sampling.truncation import candidates, largest
from runtime.messages import RowSetup
from runtime.wire import unpack_ids

LongArray: TypeAlias = npt.NDArray[np.int64]
FeatureArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(slots=True)
class SampleRows:
    """Whose tokens are sampled, on the device and on the host: [S] int64 each."""

    rows: Tensor
    positions: Tensor  # of the token to be sampled, from the start of the sequence
    rows_host: LongArray
    positions_host: LongArray


@dataclass(slots=True)
class Logprobs:
    """Of the m rows that asked, in order."""

    chosen: Tensor  # [m] float32
    top_ids: Tensor  # [m, num_top] int64
    top: Tensor  # [m, num_top] float32


@dataclass(slots=True)
class Sampled:
    tokens: Tensor  # [S] int64
    logprobs: Logprobs | None


class Sampler:
    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._columns = SamplingColumns(max_rows, vocab_size, device)
        self._penalties = PenaltyCounts(max_rows, vocab_size, device)

    def open_rows(self, setups: Sequence[RowSetup]) -> None:
        """Give rows to new tenants."""
        self._columns.open_rows(setups)
        for setup in setups:
            if self._columns.features[setup.row] & col.PENALTY:
                ids = unpack_ids(setup.penalty_ids)
                known = self._columns.known(ids)
                in_prompt = np.arange(len(ids)) < setup.num_prompt
                self._penalties.open_row(setup.row, ids[known & in_prompt], ids[known & ~in_prompt])

    def sample(self, logits: Tensor, who: SampleRows, masks: Mapping[int, bytes]) -> Sampled:
        """One token for each of S rows.

        logits [S, V] float32 are overwritten. masks: row → bitmask, bit i of int32 word j allows 32 * j + i.
        """
        features: FeatureArray = self._columns.features[who.rows_host]
        present = int(np.bitwise_or.reduce(features, initial=0))
        asked = rows_with(features, col.LOGPROBS)
        # What is reported is the model's own distribution, so it is put aside before anything changes it.
        raw = logits[self._device.tensor(asked)] if len(asked) else None
        if present & col.EDITS:
            self._edit(logits, who, features)
        if masks:
            self._mask(logits, who.rows_host, masks)
        tokens = self._draw(logits, who, features) if present & col.NOISE else logits.argmax(dim=1)
        if present & col.PENALTY:
            at = self._device.tensor(rows_with(features, col.PENALTY))
            self._penalties.add(who.rows[at], tokens[at])
        if raw is None:
            return Sampled(tokens, None)
        num_top = min(int(self._columns.num_logprobs[who.rows_host[asked]].max()), self._vocab_size)
        return Sampled(tokens, _logprobs(raw, tokens[self._device.tensor(asked)], num_top))

    def _edit(self, logits: Tensor, who: SampleRows, features: FeatureArray) -> None:
        """Penalties, then logit bias, then min tokens; in place."""
        penalised = rows_with(features, col.PENALTY)
        if len(penalised):
            at = self._device.tensor(penalised)
            rows = who.rows[at]
            c = self._columns
            edited = logits[at]
            self._penalties.apply(
                edited, rows, take(c.repetition, rows), take(c.presence, rows), take(c.frequency, rows)
            )
            logits[at] = edited
        biased = rows_with(features, col.BIAS)
        if len(biased):
            entries = [self._columns.bias[row] for row in who.rows_host[biased].tolist()]
            values = self._device.tensor(np.concatenate([values for _, values in entries]))
            at = self._flat_index(biased, [ids for ids, _ in entries])
            logits.view(-1).index_put_((at,), values, accumulate=True)
        short = rows_with(features, col.MIN_LEN)
        short = short[who.positions_host[short] < self._columns.min_len[who.rows_host[short]]]
        if len(short):
            at = self._flat_index(
                short, [self._columns.stop_ids[row] for row in who.rows_host[short].tolist()]
            )
            logits.view(-1)[at] = -math.inf

    def _flat_index(self, rows: LongArray, ids: Sequence[npt.NDArray[np.int32]]) -> Tensor:
        """Index into the flattened logits of ids[i] in row rows[i]."""
        starts = np.repeat(rows * self._vocab_size, [len(each) for each in ids])
        return self._device.tensor(starts + np.concatenate(ids))

    def _mask(self, logits: Tensor, rows_host: LongArray, masks: Mapping[int, bytes]) -> None:
        """Forbid what the bitmasks do not allow; ids beyond the end of a mask are forbidden."""
        masked = [i for i, row in enumerate(rows_host.tolist()) if row in masks]
        assert len(masked) == len(masks), "a mask for a row that samples nothing in this step"
        forbidden = np.ones((len(masked), self._vocab_size), bool)
        for i, row in enumerate(rows_host[masked].tolist()):
            bits = np.unpackbits(
                np.frombuffer(masks[row], np.uint8), bitorder="little", count=self._vocab_size
            )
            forbidden[i] = bits == 0
        at = self._device.tensor(np.array(masked, np.int64))
        logits[at] = logits[at].masked_fill_(self._device.tensor(forbidden), -math.inf)

    def _draw(self, logits: Tensor, who: SampleRows, features: FeatureArray) -> Tensor:
        """A token for each row: drawn for those with a temperature, the largest logit for the others."""
        truncated = rows_with(features, col.TOP_K | col.TOP_P)
        whole = np.flatnonzero((features & (col.TOP_K | col.TOP_P | col.NOISE)) == col.NOISE)
        if len(whole) == len(features):
            return self._draw_whole(logits, who.rows, who.positions, bool((features & col.MIN_P).any()))
        if len(truncated) == len(features):
            return self._draw_truncated(logits, who.rows, who.positions, self._max_top_k(who.rows_host))
        tokens = logits.argmax(dim=1)
        if len(whole):
            at = self._device.tensor(whole)
            min_p = bool((features[whole] & col.MIN_P).any())
            tokens[at] = self._draw_whole(logits[at], who.rows[at], who.positions[at], min_p)
        if len(truncated):
            at = self._device.tensor(truncated)
            max_top_k = self._max_top_k(who.rows_host[truncated])
            tokens[at] = self._draw_truncated(logits[at], who.rows[at], who.positions[at], max_top_k)
        return tokens

    def _max_top_k(self, rows_host: LongArray) -> int:
        return int(self._columns.max_top_k[rows_host].max())

    def _draw_whole(self, logits: Tensor, rows: Tensor, positions: Tensor, min_p: bool) -> Tensor:
        """Draw from the whole vocabulary, less what min-p cuts off."""
        logits = logits / take(self._columns.temperature, rows).unsqueeze(1)
        if min_p:
            lowest = logits.amax(dim=1, keepdim=True) + take(self._columns.min_logit_gap, rows).unsqueeze(1)
            logits.masked_fill_(logits < lowest, -math.inf)
        prune = not self._device.prefers_one_pass
        return perturbed(logits, take(self._columns.seed, rows), positions, prune=prune).argmax(dim=1)

    def _draw_truncated(self, logits: Tensor, rows: Tensor, positions: Tensor, max_top_k: int) -> Tensor:
        """Draw from what top-k, top-p and min-p leave."""
        c = self._columns
        logits = logits / take(c.temperature, rows).unsqueeze(1)
        values, ids = candidates(
            logits,
            take(c.top_k, rows),
            take(c.top_p, rows),
            take(c.min_logit_gap, rows),
            max_top_k=max_top_k,
            one_pass=self._device.prefers_one_pass,
        )
        seeds = take(c.seed, rows)
        # One counter makes the noise of four neighbours: with this many candidates all of it is less work.
        if LANES * ids.shape[1] >= self._vocab_size:
            left = torch.full_like(logits, -math.inf).scatter_(1, ids, values)
            return perturbed(left, seeds, positions, prune=False).argmax(dim=1)
        values = values + noise_at(seeds, positions, ids)
        best = values.amax(dim=1, keepdim=True)
        return ids.masked_fill_(values < best, self._vocab_size - 1).amin(dim=1)


def _logprobs(raw: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Log-softmax of raw [m, V] at tokens [m] and at the num_top most likely ids."""
    logprobs = torch.log_softmax(raw, dim=1)
    _, top_ids = largest(raw, num_top)
    return Logprobs(logprobs.gather(1, tokens.unsqueeze(1))[:, 0], top_ids, logprobs.gather(1, top_ids))
