"""Products and sums between the modules of a layer, and the cap of logits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class CombineLike(Protocol):
    """`combine`, or what computes the same."""

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
    """x * scale, then with cap: cap * tanh(. / cap), then with add: the sum. All [T, N] of one dtype, in
    which each step is rounded. The result is in `out`, which may be x or add, where it is given.
    """
    if scale != 1.0 or (cap is None and add is None):
        x = torch.mul(x, scale, out=out)
    if cap is not None:
        x = torch.div(x, cap, out=out).tanh_().mul_(cap)
    return x if add is None else torch.add(add, x, out=out)
