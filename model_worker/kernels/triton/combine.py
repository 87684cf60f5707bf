"""A product, a soft-cap and a sum of equal shapes, in one launch; see model_worker.kernels.combine.

grid   block of elements
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite

BLOCK = 1024


def combine(
    x: Tensor,
    *,
    scale: float = 1.0,
    cap: float | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Do what model_worker.kernels.combine.combine does; all tensors are contiguous."""
    out = torch.empty_like(x) if out is None else out
    assert all(each is None or each.is_contiguous() for each in (x, add, out))
    n = x.numel()
    if n:
        site = _combines(cap is not None, add is not None)
        site.launch((-(-n // BLOCK), 1, 1), x, out if add is None else add, out, n, scale, cap or 0.0)
    return out


@cache
def _combines(caps: bool, adds: bool) -> CallSite:
    return CallSite(_combine, CAPS=caps, ADDS=adds, BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["n", "scale", "cap"])
def _combine(x, add, out, n, scale, cap, CAPS: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    dtype = out.dtype.element_ty
    # Each step is rounded to the dtype, as torch's operations are.
    value = (tl.load(x + i, mask=inside, other=0.0).to(tl.float32) * scale).to(dtype)
    if CAPS:
        value = tl.math.div_rn(value.to(tl.float32), cap).to(dtype)
        value = _tanh(value.to(tl.float32)).to(dtype)
        value = (value.to(tl.float32) * cap).to(dtype)
    if ADDS:
        other = tl.load(add + i, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
    tl.store(out + i, value, mask=inside)


@triton.jit
def _tanh(x):
    """Return tanh(x) with a relative error of about 1e-6 at most. By exp alone a small x would lose its
    digits.
    """
    t = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - t) / (1.0 + t)
    x2 = x * x
    small = x * (1.0 - x2 * (1.0 / 3.0 - x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    return tl.where(x2 < 0.04, small, tl.where(x < 0.0, -large, large))
