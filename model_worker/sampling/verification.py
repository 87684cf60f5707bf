"""Verification of guesses in rows whose sampling depends on earlier tokens, place by place, so that results
are those without guesses.

The state of such a row (counts, history, the age of its top-p) is on the device. So the first places of all
rows are sampled and remembered, then the second ones of rows whose first guess was right, and so on. At each
place the row's state contains the tokens before it, and never a wrong guess.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling.columns import FeatureArray, SampleRows
from model_worker.sampling.guesses import NO_GUESS, first_places
from model_worker.sampling.logprobs import Logprobs
from model_worker.sampling.step import StepSample
from runtime.sampling.features import REMEMBERS
from runtime.wire.format import LongArray, RowMasks

Sample = Callable[[Tensor, SampleRows, RowMasks], StepSample]
"""Function that samples rows of logits, each of another row of the tables."""


def looks_back(features: FeatureArray, sample_rows: SampleRows) -> bool:
    """Return True if the sampling of a row with guesses depends on its earlier tokens; if not, all places are
    sampled at once. features: by row.
    """
    assert sample_rows.guesses is not None
    guessing = sample_rows.rows_host[sample_rows.guesses != NO_GUESS]
    return bool((features[guessing] & REMEMBERS).any())


def sample_in_turns(
    sample: Sample, logits: Tensor, sample_rows: SampleRows, masks: RowMasks, device: Device
) -> StepSample:
    """Sample the valid places; the tokens of others are 0. See Sampler.sample."""
    assert sample_rows.guesses is not None
    tokens = torch.zeros(len(sample_rows.rows_host), dtype=torch.int64, device=logits.device)
    places, turns = first_places(sample_rows.guesses), list[tuple[LongArray, StepSample]]()
    while len(places):
        at = device.tensor(places)
        those = SampleRows(
            sample_rows.rows[at],
            sample_rows.positions[at],
            sample_rows.rows_host[places],
            sample_rows.positions_host[places],
        )
        sampled = sample(logits[at], those, masks)
        tokens[at] = sampled.tokens
        turns.append((places, sampled))
        is_right = sampled.tokens.cpu().numpy() == sample_rows.guesses[places]
        places = places[is_right] + 1
        masks = masks_behind(masks, sample_rows.rows_host[places])
    return _joined(tokens, turns, device)


def masks_behind(masks: RowMasks, rows_host: LongArray) -> RowMasks:
    """Return the masks of these rows for the places behind their next ones."""
    return {row: behind for row in rows_host.tolist() if row in masks and (behind := masks[row][1:])}


def _joined(tokens: Tensor, turns: list[tuple[LongArray, StepSample]], device: Device) -> StepSample:
    """Return the reports of all turns in the order of their places."""
    joined = StepSample(tokens)
    if reports := [(places[s.logprobs_of], s.logprobs) for places, s in turns if s.logprobs is not None]:
        joined.logprobs_of, order = _in_order([of for of, _ in reports], device)
        # The first turn has all rows, so no other turn reports more of the most likely ids.
        num_top = reports[0][1].top.shape[1]
        each = [(r.chosen, _widened(r.top_ids, num_top), _widened(r.top, num_top)) for _, r in reports]
        joined.logprobs = Logprobs(*(torch.cat(parts)[order] for parts in zip(*each, strict=True)))
    joined.errors = [(places.item(at), error) for places, s in turns for at, error in s.errors]
    if raw := [(places[s.logits_of], s.logits) for places, s in turns if s.logits is not None]:
        joined.logits_of, order = _in_order([of for of, _ in raw], device)
        joined.logits = torch.cat([logits for _, logits in raw])[order]
    # All rows with processors are in the first turn.
    if turns and turns[0][1].scores is not None:
        places, first = turns[0]
        joined.scores, joined.scores_of = first.scores, places[first.scores_of]
    return joined


def _in_order(places: list[LongArray], device: Device) -> tuple[LongArray, Tensor]:
    together = np.concatenate(places)
    order = np.argsort(together)
    return together[order], device.tensor(order)


def _widened(of_turn: Tensor, num_top: int) -> Tensor:
    return torch.nn.functional.pad(of_turn, (0, num_top - of_turn.shape[1]))
