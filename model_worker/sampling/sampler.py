"""Sampler: one token for each row of logits, in the order of docs/sampling.md.

    repetition → presence, frequency → logit bias → allowed ids, mask → min tokens, bad words, n-grams
    → ÷ temperature → top-k → top-p → min-p → argmax(logit + Gumbel noise of (seed, position, id))

What forbids an id does so whatever its place in the order; those that may yield come last, because they must
see what is left. A step touches only the rows that need a feature; a batch of plain greedy rows is one
argmax. A row's token depends on its own logits, parameters, history and position, never on what else is in
the batch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.kernels.native.library import NativeKernels
from model_worker.sampling.columns import (
    FeatureArray,
    LongArray,
    SampleRows,
    SamplingColumns,
    rows_with,
    take,
)
from model_worker.sampling.logit_bias import LogitBias
from model_worker.sampling.logprobs import Logprobs, logprobs_of
from model_worker.sampling.masks import apply_masks, stage_masks
from model_worker.sampling.native import NativeLogprobs, NativeSampling
from model_worker.sampling.noise import noise_at, perturbed
from model_worker.sampling.penalties import PenaltyCounts
from model_worker.sampling.philox import LANES
from model_worker.sampling.prohibitions import Prohibitions
from model_worker.sampling.top_p_decay import TopPDecay
from model_worker.sampling.truncation import candidates
from runtime.sampling import features as bit
from runtime.wire.format import unpack_floats, unpack_ids
from runtime.wire.plan import RowSetup

NO_ROWS = np.zeros(0, np.int64)


class DrawKind(enum.Enum):
    """What rows need of which a draw is all that is wanted: their logits are not edited."""

    WHOLE = enum.auto()  # greedy rows, and draws from the whole vocabulary
    TRUNCATED = enum.auto()  # some with top-k, top-p or min-p


@dataclass(slots=True)
class Sampled:
    tokens: Tensor  # [S] int64
    logprobs: Logprobs | None  # of the rows that asked
    logits: Tensor | None  # [m, V] float32, raw, of the rows that asked
    logits_of: LongArray  # [m] which of S they belong to


class Sampler:
    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_len: int,
        vocab_size: int,
        kernels: NativeKernels | None = None,
    ) -> None:
        """max_len: tokens of the longest sequence, prompt and output. kernels: a CPU samples by them."""
        self._device = device
        self._vocab_size = vocab_size
        self._columns = SamplingColumns(max_rows, vocab_size, device)
        self._penalties = PenaltyCounts(max_rows, vocab_size, device)
        self._bias = LogitBias(max_rows, device)
        self._prohibitions = Prohibitions(
            self._columns, max_rows=max_rows, max_len=max_len, vocab_size=vocab_size, device=device
        )
        self._decay = TopPDecay(self._columns, max_rows, device)
        self.native = None if kernels is None else NativeSampling(kernels, self._columns, vocab_size)
        self._logprobs_of = logprobs_of if kernels is None else NativeLogprobs(kernels)

    def open_rows(self, setups: Sequence[RowSetup]) -> None:
        """Give rows to new tenants."""
        self._columns.open_rows(setups)
        for setup in setups:
            features = self._columns.features.item(setup.row)
            if features & bit.PENALTY:
                ids = unpack_ids(setup.history_ids)
                known = self._columns.known(ids)
                in_prompt = np.arange(len(ids)) < setup.num_prompt
                self._penalties.open_row(setup.row, ids[known & in_prompt], ids[known & ~in_prompt])
            ids, values = unpack_ids(setup.bias_ids), unpack_floats(setup.bias_values)
            known = self._columns.known(ids)
            self._bias.open_row(setup.row, ids[known], values[known])
            self._prohibitions.open_row(setup, features)
            if features & bit.TOP_P_DECAY:
                self._decay.open_row(setup.row, unpack_ids(setup.top_p_reset_ids))

    def sample(self, logits: Tensor, who: SampleRows, masks: Mapping[int, bytes]) -> Sampled:
        """One token for each of S rows.

        logits [S, V] float32 are overwritten. masks: row → bitmask, bit i of int32 word j allows 32 * j + i.
        """
        features: FeatureArray = self._columns.features[who.rows_host]
        present = int(np.bitwise_or.reduce(features, initial=0))
        # What is reported is the model's own distribution, so it is put aside before anything changes it.
        asked, logits_of, raw = NO_ROWS, NO_ROWS, None
        if present & (bit.LOGPROBS | bit.LOGITS):
            asked, logits_of = rows_with(features, bit.LOGPROBS), rows_with(features, bit.LOGITS)
        returned = logits[self._device.tensor(logits_of)] if len(logits_of) else None
        if len(asked):
            stays = self.native is not None and not masks and not present & bit.CHANGES
            raw = logits if stays and len(asked) == len(features) else logits[self._device.tensor(asked)]
        if present & bit.EDITS:
            self._edit(logits, who, features)
        if present & bit.ALLOWED:
            self._prohibitions.apply_allowed_ids(logits, who, features)
        if masks:
            self._mask(logits, who.rows_host, masks)
        if present & bit.FORBIDS:
            may_empty = bool(masks) or bool(present & bit.ALLOWED)
            self._prohibitions.apply(logits, who, features, may_empty=may_empty)
        if self.native is not None:
            tokens = self.native.draw(logits, who)
        elif present & bit.NOISE:
            tokens = self._draw(logits, who, features)
        else:
            tokens = logits.argmax(dim=1)
        if present & bit.REMEMBERS:
            self._remember(tokens, who, features)
        logprobs = None
        if raw is not None:
            num_top = int(self._columns.host["num_logprobs"][who.rows_host[asked]].max())
            logprobs = self._logprobs_of(raw, tokens[self._device.tensor(asked)], num_top)
        return Sampled(tokens, logprobs, returned, logits_of)

    def _edit(self, logits: Tensor, who: SampleRows, features: FeatureArray) -> None:
        """Penalties, then logit bias; in place."""
        if logits.is_cuda:
            self._edit_by_kernel(logits, who, features)
            return
        penalised = rows_with(features, bit.PENALTY)
        if len(penalised):
            at = self._device.tensor(penalised)
            rows = who.rows[at]
            if self.native is not None:
                self.native.penalise(logits, at, rows, self._penalties.counts)
            else:
                c = self._columns
                edited = logits[at]
                self._penalties.apply(
                    edited, rows, take(c.repetition, rows), take(c.presence, rows), take(c.frequency, rows)
                )
                logits[at] = edited
        biased = rows_with(features, bit.BIAS)
        if len(biased):
            at = self._device.tensor(biased)
            self._bias.apply(logits, at, who.rows[at])

    def _edit_by_kernel(self, logits: Tensor, who: SampleRows, features: FeatureArray) -> None:
        """As `_edit`, by kernels that find out by row who is edited."""
        if (features & bit.PENALTY).any():
            self._penalties.apply_by_kernel(logits, who.rows, self._columns)
        if (features & bit.BIAS).any():
            self._bias.apply_by_kernel(logits, who.rows)

    def _remember(self, tokens: Tensor, who: SampleRows, features: FeatureArray) -> None:
        """Let the next step know of the tokens, whether or not the host sees them before."""
        penalised = rows_with(features, bit.PENALTY)
        if len(penalised) and tokens.is_cuda:
            self._penalties.add_by_kernel(who.rows, tokens, self._columns)
        elif len(penalised):
            at = self._device.tensor(penalised)
            self._penalties.add(who.rows[at], tokens[at])
        kept = rows_with(features, bit.HISTORY)
        if len(kept):
            at = self._device.tensor(kept)
            self._prohibitions.history.append(
                who.rows[at], who.positions[at], tokens[at], who.positions_host[kept]
            )
        decaying = rows_with(features, bit.TOP_P_DECAY)
        if len(decaying):
            at = self._device.tensor(decaying)
            self._decay.count(who.rows[at], tokens[at], who.rows_host[decaying])

    def _mask(self, logits: Tensor, rows_host: LongArray, masks: Mapping[int, bytes]) -> None:
        """Forbid what the bitmasks do not allow, in place."""
        staged = stage_masks(self._device, rows_host, masks, self._vocab_size)
        if logits.is_cuda:
            from model_worker.sampling.triton.logit_edits import forbid_masked

            forbid_masked(logits, *staged)
        elif self.native is not None:
            self.native.forbid_masked(logits, staged)
        else:
            apply_masks(logits, staged)

    def _draw(self, logits: Tensor, who: SampleRows, features: FeatureArray) -> Tensor:
        """A token for each row: drawn for those with a temperature, the largest logit for the others."""
        if logits.is_cuda:
            return self._draw_by_kernel(logits, who, features)
        truncated = rows_with(features, bit.TOP_K | bit.TOP_P)
        whole = np.flatnonzero((features & (bit.TOP_K | bit.TOP_P | bit.NOISE)) == bit.NOISE)
        if len(whole) == len(features):
            return self._draw_whole(logits, who.rows, who.positions, bool((features & bit.MIN_P).any()))
        if len(truncated) == len(features):
            return self._draw_truncated(logits, who.rows, who.positions, who.rows_host)
        tokens = logits.argmax(dim=1)
        if len(whole):
            at = self._device.tensor(whole)
            min_p = bool((features[whole] & bit.MIN_P).any())
            tokens[at] = self._draw_whole(logits[at], who.rows[at], who.positions[at], min_p)
        if len(truncated):
            at = self._device.tensor(truncated)
            rows_host = who.rows_host[truncated]
            tokens[at] = self._draw_truncated(logits[at], who.rows[at], who.positions[at], rows_host)
        return tokens

    def _draw_by_kernel(self, logits: Tensor, who: SampleRows, features: FeatureArray) -> Tensor:
        """As `_draw`, for all kinds of rows in the same few launches."""
        truncates = bool((features & bit.TRUNCATES).any())
        kind = DrawKind.TRUNCATED if truncates else DrawKind.WHOLE
        decaying = rows_with(features, bit.TOP_P_DECAY)
        if not len(decaying):
            return self.draw(logits, who.rows, who.positions, kind)
        top_p = self._columns.top_p.clone()
        rows = who.rows[self._device.tensor(decaying)]
        top_p[rows] = self._decay.top_p(rows)
        return self.draw(logits, who.rows, who.positions, kind, top_p=top_p)

    def draw_kind(self, rows_host: LongArray) -> DrawKind | None:
        """What `draw` has to do for the tokens of these rows; None: a draw is not all that they need."""
        present = int(np.bitwise_or.reduce(self._columns.features[rows_host], initial=0))
        if present & ~bit.DRAWABLE:
            return None
        return DrawKind.TRUNCATED if present & bit.TRUNCATES else DrawKind.WHOLE

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        kind: DrawKind,
        *,
        top_p: Tensor | None = None,
        out: Tensor | None = None,
        last_token: Tensor | None = None,
    ) -> Tensor:
        """Tokens [n] int64 of logits [n, V], by kernels that read the parameters by row: all of it is decided
        on the device, and nothing else is launched. rows, positions [n] int64.

        top_p [max_rows + 1] float32: a column in place of the rows' own. out [n] int64 and last_token
        [max_rows + 1] int64, by row, get the tokens.
        """
        # Imported where a GPU is used, and only there: a CPU needs no triton.
        from model_worker.sampling.triton.draw import draw

        return draw(
            logits,
            rows,
            positions,
            self._columns,
            truncates=kind is DrawKind.TRUNCATED,
            top_p=top_p,
            out=out,
            last_token=last_token,
        )

    def _draw_whole(self, logits: Tensor, rows: Tensor, positions: Tensor, min_p: bool) -> Tensor:
        """Draw from the whole vocabulary, less what min-p cuts off."""
        logits = logits / take(self._columns.temperature, rows).unsqueeze(1)
        if min_p:
            lowest = logits.amax(dim=1, keepdim=True) + take(self._columns.min_logit_gap, rows).unsqueeze(1)
            logits.masked_fill_(logits < lowest, -math.inf)
        prune = not self._device.prefers_one_pass
        return perturbed(logits, take(self._columns.seed, rows), positions, prune=prune).argmax(dim=1)

    def _draw_truncated(
        self, logits: Tensor, rows: Tensor, positions: Tensor, rows_host: LongArray
    ) -> Tensor:
        """Draw from what top-k, top-p and min-p leave."""
        c = self._columns
        decays = bool((c.features[rows_host] & bit.TOP_P_DECAY).any())
        logits = logits / take(c.temperature, rows).unsqueeze(1)
        values, ids = candidates(
            logits,
            take(c.top_k, rows),
            self._decay.top_p(rows) if decays else take(c.top_p, rows),
            take(c.min_logit_gap, rows),
            max_top_k=int(c.host["top_k"][rows_host].max()),
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
