"""Positions of a plan at which tokens are sampled: one for each row that samples, and one before
each guess.
"""

from __future__ import annotations

import numpy as np

from model_worker.sampling.guesses import NO_GUESS
from runtime.wire.format import LongArray, unpack_ids
from runtime.wire.plan import BatchPlan


def has_drafts(plan: BatchPlan) -> bool:
    """Return True if a row has guesses."""
    return plan.drafts != bytes(len(plan.drafts))


def sampled_places(plan: BatchPlan) -> tuple[LongArray, LongArray, LongArray]:
    """Return three arrays [S] for the S sampled positions: index of the row in the plan's `rows`, position of
    the token to be sampled, and the guess that follows (NO_GUESS for a row's last).
    """
    starts, ids = unpack_ids(plan.starts).astype(np.int64), unpack_ids(plan.input_ids)
    lens, num_places = np.ones((2, len(starts)), np.int64)
    lens[plan.num_decodes :] = unpack_ids(plan.lens)
    num_places[plan.num_decodes :] = unpack_ids(plan.samples)
    if has_drafts(plan):
        drafts = unpack_ids(plan.drafts)
        known = lens[plan.num_decodes :] - drafts
        guesses_well = (drafts == 0) | (drafts > 0) & (known > 0) & (num_places[plan.num_decodes :] == 1)
        assert guesses_well.all(), "drafts of a row that samples nothing, or with nothing before them"
        num_places[plan.num_decodes :] += drafts
    index = np.repeat(np.arange(len(starts)), num_places)
    num_behind = np.repeat(np.cumsum(num_places), num_places) - np.arange(len(index)) - 1
    guesses = ids[np.cumsum(lens)[index] - np.maximum(num_behind, 1)].astype(np.int64)
    guesses[num_behind == 0] = NO_GUESS
    assert (guesses[num_behind > 0] >= 0).all(), "a guess that the host does not know"
    return index, (starts + lens)[index] - num_behind, guesses
