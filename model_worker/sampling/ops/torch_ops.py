"""TorchSampling: sampling by torch operations, the reference on any device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.kernels.native.sample_calls import DrawCall
from model_worker.sampling.columns import IN_PROMPT, SamplingColumns, take
from model_worker.sampling.forbid import by_owner, forbid
from model_worker.sampling.logprobs import Logprobs, logprobs_of
from model_worker.sampling.masks import StepMasks, apply_masks
from model_worker.sampling.noise import noise_at, perturbed
from model_worker.sampling.ops.base import DrawKind
from model_worker.sampling.philox import LANES
from model_worker.sampling.row_table import RowTable
from model_worker.sampling.step import SamplingStep, StepRows
from model_worker.sampling.truncation import candidates, within_sigmas
from runtime.sampling import features as bit


class TorchSampling:
    def __init__(self, columns: SamplingColumns, device: Device) -> None:
        self.features = columns.features
        self._columns = columns
        self._device = device

    def draw(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """Return a token [S] int64 for each row: drawn for rows with a temperature, the id of the largest
        logit for others.
        """
        features = step.features
        if not step.present & bit.NOISE:
            return logits.argmax(dim=1)
        truncated = step.rows_with(bit.TOP_K | bit.TOP_P)
        whole = StepRows(step, np.flatnonzero((features & (bit.TOP_K | bit.TOP_P | bit.NOISE)) == bit.NOISE))
        if len(whole) == len(step):
            return self._draw_whole(logits, step.sample_rows.rows, step.sample_rows.positions, whole)
        if len(truncated) == len(step):
            return self._draw_truncated(logits, step.sample_rows.rows, step.sample_rows.positions, truncated)
        tokens = logits.argmax(dim=1)
        if len(whole):
            tokens[whole.at] = self._draw_whole(logits[whole.at], whole.rows, whole.positions, whole)
        if len(truncated):
            tokens[truncated.at] = self._draw_truncated(
                logits[truncated.at], truncated.rows, truncated.positions, truncated
            )
        return tokens

    def _scaled(self, logits: Tensor, rows: Tensor, present: int) -> Tensor:
        """Return the logits divided by the temperature, -inf where top-n-sigma cuts them off."""
        scaled = logits / take(self._columns.temperature, rows).unsqueeze(1)
        if not present & bit.TOP_N_SIGMA:
            return scaled
        return within_sigmas(scaled, take(self._columns.top_n_sigma, rows))

    def _draw_whole(self, logits: Tensor, rows: Tensor, positions: Tensor, selected: StepRows) -> Tensor:
        """Draw from the whole vocabulary, except for ids that top-n-sigma and min-p cut off."""
        logits = self._scaled(logits, rows, selected.step.present)
        if (selected.step.features[selected.index] & bit.MIN_P).any():
            lowest = logits.amax(dim=1, keepdim=True) + take(self._columns.min_logit_gap, rows).unsqueeze(1)
            logits.masked_fill_(logits < lowest, -math.inf)
        prune = not self._device.prefers_one_pass
        return perturbed(logits, take(self._columns.seed, rows), positions, prune=prune).argmax(dim=1)

    def _draw_truncated(self, logits: Tensor, rows: Tensor, positions: Tensor, selected: StepRows) -> Tensor:
        """Draw from the ids that top-n-sigma, top-k, top-p and min-p leave."""
        c = self._columns
        logits = self._scaled(logits, rows, selected.step.present)
        values, ids = candidates(
            logits,
            take(c.top_k, rows),
            top_p_of(c, rows) if selected.step.present & bit.TOP_P_DECAY else take(c.top_p, rows),
            take(c.min_logit_gap, rows),
            max_top_k=int(c.host["top_k"][selected.rows_host].max()),
            one_pass=self._device.prefers_one_pass,
        )
        seeds = take(c.seed, rows)
        # One counter makes the noise of four neighbours: with this many candidates all of it is less work.
        if LANES * ids.shape[1] >= logits.shape[1]:
            left = torch.full_like(logits, -math.inf).scatter_(1, ids, values)
            return perturbed(left, seeds, positions, prune=False).argmax(dim=1)
        values = values + noise_at(seeds, positions, ids)
        best = values.amax(dim=1, keepdim=True)
        return ids.masked_fill_(values < best, logits.shape[1] - 1).amin(dim=1)

    def draw_by_row(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        kind: DrawKind,
        *,
        out: Tensor | None = None,
        last_token: Tensor | None = None,
    ) -> Tensor:
        """Draw tokens [n] int64 from logits [n, V] for table rows and positions [n] int64, by operations that
        read the parameters by row; see SamplingOps.
        """
        c = self._columns
        x = self._scaled(logits, rows, bit.TOP_N_SIGMA if kind is DrawKind.TRUNCATED else 0)
        if kind is DrawKind.TRUNCATED:
            limits = take(c.top_k, rows), take(c.top_p, rows), take(c.min_logit_gap, rows)
            values, ids = candidates(x, *limits, max_top_k=logits.shape[1], one_pass=True)
            x = torch.full_like(x, -math.inf).scatter_(1, ids, values)
        drawn = perturbed(x, take(c.seed, rows), positions, prune=False).argmax(dim=1)
        tokens = torch.where(take(c.is_greedy, rows) != 0, logits.argmax(dim=1), drawn)
        if last_token is not None:
            last_token[rows] = tokens
        return tokens if out is None else out.copy_(tokens)

    def draw_call(self, logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor) -> DrawCall | None:
        """Return the call with which a recorded C++ step draws tokens, which is None here."""
        return None

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int, *, ranks: bool = False) -> Logprobs:
        """Return the log-softmax of logits [m, V] at tokens [m] int64 and at the num_top most likely ids;
        with ranks, also the places of the tokens.
        """
        return logprobs_of(logits, tokens, num_top, ranks=ranks)

    def penalise(self, logits: Tensor, penalised: StepRows, counts: Tensor) -> None:
        """Apply penalties. The repetition penalty divides positive logits of tokens in prompt or output and
        multiplies negative ones; presence and frequency penalty only consider the output.
        """
        c, at, rows = self._columns, penalised.at, penalised.rows
        counts, edited = counts[rows], logits[at]
        repetition = take(c.repetition, rows).unsqueeze(1)
        repeated = torch.where(edited > 0, edited / repetition, edited * repetition)
        torch.where(counts != 0, repeated, edited, out=edited)
        times = (counts & (IN_PROMPT - 1)).float()
        edited -= take(c.frequency, rows).unsqueeze(1) * times
        edited -= take(c.presence, rows).unsqueeze(1) * (times > 0)
        logits[at] = edited

    def count(self, counts: Tensor, penalised: StepRows, tokens: Tensor) -> None:
        """Count the tokens [S] int64 of these rows in counts [max_rows, V] int32."""
        rows, sampled = penalised.rows, tokens[penalised.at]
        counts[rows, sampled] = counts[rows, sampled] + 1

    def add_bias(self, logits: Tensor, biased: StepRows, table: RowTable) -> None:
        """Add biases to the logits of these rows. table: ids, then the bits of float32 values; see
        SamplingOps.
        """
        ids, bits = table.take(biased.rows).unbind(1)
        index = biased.at.unsqueeze(1) * logits.shape[1] + ids.clamp_min(0)
        values = bits.contiguous().view(torch.float32).masked_fill(ids < 0, 0.0)
        logits.view(-1).index_put_((index,), values, accumulate=True)

    def forbid_masked(self, logits: Tensor, masks: StepMasks) -> None:
        """Forbid the ids that a mask does not allow."""
        apply_masks(logits, masks)

    def forbid_below(self, logits: Tensor, short: StepRows, table: RowTable) -> None:
        """Forbid the listed ids of those rows whose position is below their minimum length;
        see SamplingOps.
        """
        forbid(logits, *by_owner(short.at, table.take(short.rows)[:, 0].long()), None)


def top_p_of(columns: SamplingColumns, rows: Tensor) -> Tensor:
    """Return the top_p of rows [n] at their age, float32; without decay, the row's own top_p."""
    # In float64, so that rounding it gives the same number on every device.
    factor = take(columns.top_p_decay, rows).double() ** take(columns.top_p_age, rows)
    return torch.maximum(take(columns.top_p_min, rows), (take(columns.top_p, rows) * factor).float())
