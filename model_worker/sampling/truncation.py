"""Truncation: the ids of a row that may be drawn under top-n-sigma, top-k, top-p and min-p.

Ids are ordered by logit, largest first, equal logits by id. Each of the last three keeps a prefix of that
order, so the shortest prefix decides. Probability mass is counted in integers, whose sums are exact. So the
ids that a row keeps depend neither on other rows, nor on the width of a search, nor on the order of
summation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# exp(logit - largest) in units of 2^-40: what is more than 27.7 nats below the largest logit counts nothing,
# and the sum over 2^22 ids stays below 2^63.
MASS_ONE = float(1 << 40)
FIRST_WIDTH = 256
ID_BITS = 32
ID_MASK = (1 << ID_BITS) - 1


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row [n, k] float32 and their ids int64, largest first, equal ones
    by id. NaN sorts above or below all numbers, by its sign; nothing raises.
    """
    num_ids = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # adding 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(num_ids, device=logits.device)
    keys = (ordered.long() << ID_BITS) | (ID_MASK - ids)
    top = _largest_keys(keys, k)
    top_ids = ID_MASK - (top & ID_MASK)
    return logits.gather(1, top_ids), top_ids


def _largest_keys(keys: Tensor, k: int) -> Tensor:
    """Return the k largest keys of each row [n, k], largest first."""
    return _SELECTIONS.get(keys.device.type, _by_torch)(keys, k)


def _by_torch(keys: Tensor, k: int) -> Tensor:
    return torch.topk(keys, k, dim=1).values


def _by_numpy(keys: Tensor, k: int) -> Tensor:
    # NumPy sorts and selects with vector instructions, which PyTorch does not: 8 to 9 times faster on AVX-512
    # (64 rows of 4,096 and 8 rows of 151,936 ids: 0.65 and 5 ms to sort, 0.2 and 0.7 ms to select 256).
    array = keys.numpy()
    num_ids = array.shape[1]
    if 0 < k < num_ids:
        array = np.partition(array, num_ids - k, axis=1)
    ascending = np.sort(array[:, num_ids - k :], axis=1)
    return torch.from_numpy(ascending).flip(1)


_SELECTIONS = {"cpu": _by_numpy}


def within_sigmas(logits: Tensor, num_sigmas: Tensor) -> Tensor:
    """Return logits [n, k] with -inf where they are more than num_sigmas [n] population standard deviations
    of the row's finite logits below the largest; 0: all stay. Computed in float64, so that the order of
    summation only matters for the last bits.
    """
    is_finite = logits.isfinite()
    count = is_finite.sum(dim=1, keepdim=True).clamp_min(1)
    x = logits.double().where(is_finite, 0.0)
    distances = (x - x.sum(dim=1, keepdim=True) / count).where(is_finite, 0.0)
    deviations = (distances.square().sum(dim=1, keepdim=True) / count).sqrt()
    num_sigmas = num_sigmas.unsqueeze(1)
    lowest = logits.amax(dim=1, keepdim=True) - num_sigmas.double() * deviations
    return logits.masked_fill((logits < lowest.float()) & (num_sigmas > 0.0), -torch.inf)


def masses(logits: Tensor, highest: Tensor) -> Tensor:
    """Return the unnormalised probability of logits [n, k] in units of 2^-40, int64. highest [n, 1]: the
    largest logit.
    """
    return (logits - highest).exp_().nan_to_num_(0.0).mul_(MASS_ONE).long()


def candidates(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_logit_gap: Tensor, *, max_top_k: int, one_pass: bool
) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row [n, width] float32, -inf where they are cut off, and their ids
    int64.

    top_k [n] int64, 0 keeps all; top_p [n] float32, 1 keeps all; min_logit_gap [n] float32 is log(min_p),
    -inf keeps all. max_top_k: the largest of top_k. The width starts small and grows until no row needs more;
    with `one_pass` it is the whole vocabulary at once.
    """
    vocab_size = logits.shape[1]
    highest = logits.amax(dim=1, keepdim=True)
    lowest = highest + min_logit_gap.unsqueeze(1)
    total = masses(logits, highest).sum(dim=1, keepdim=True)
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp_max(vocab_size).unsqueeze(1)
    width = vocab_size if one_pass else min(vocab_size, max(FIRST_WIDTH, max_top_k))
    while True:
        values, ids = largest(logits, width)
        cumulative = masses(values, highest).cumsum(dim=1)
        within_k = cumulative.gather(1, (top_k - 1).clamp_max(width - 1))
        budget = top_p.unsqueeze(1).double() * torch.where(top_k <= width, within_k, total)
        before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
        rank = torch.arange(width, device=logits.device)
        keep = (before < budget) | (top_p.unsqueeze(1) >= 1.0)
        keep &= (rank < top_k) & (values >= lowest)
        keep[:, 0] = True
        # If the last candidate of a row is kept, more may have to be, unless its k allows no more.
        if one_pass:
            return values.masked_fill_(~keep, -torch.inf), ids
        if width == vocab_size or not bool((keep[:, -1:] & (top_k > width)).any()):
            needed = int(keep.sum(dim=1).max())
            return values.masked_fill_(~keep, -torch.inf)[:, :needed], ids[:, :needed]
        width = min(vocab_size, 8 * width)
