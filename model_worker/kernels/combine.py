"""Products and sums between the modules of a layer, and the soft-cap of logits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class CombineLike(Protocol):
    """Type of `combine` and of other implementations of it."""

    def __call__(
        self,
        x: Tensor,
        *,
        scale: float = 1.0,
        cap: float | None = None,
        add: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


def combine(
    x: Tensor,
    *,
    scale: float = 1.0,
    cap: float | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x * scale, then with cap: cap * tanh(. / cap), then with add: the sum. All are [T, N] of one
    dtype, to which each step is rounded. out: tensor for the result, which may be x or add.
    """
    if scale != 1.0 or (cap is None and add is None):
        x = torch.mul(x, scale, out=out)
    if cap is not None:
        x = torch.div(x, cap, out=out).tanh_().mul_(cap)
    return x if add is None else torch.add(add, x, out=out)
