"""Token ids to rows of a table, in one launch; see model_worker.kernels.embedding.embed.

grid   token × block of the width
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite

BLOCK = 1024


def embed(ids: Tensor, weight: Tensor, *, first: int | None = None, scale: float = 1.0) -> Tensor:
    """Do what model_worker.kernels.embedding.embed does. Nothing outside the table is read, whatever an id
    is.
    """
    num_rows, width = weight.shape
    num_tokens = ids.shape[0]
    out = weight.new_empty((num_tokens, width))
    if num_tokens:
        grid = (num_tokens, -(-width // BLOCK), 1)
        _embeds(width).launch(grid, ids, weight, out, first or 0, num_rows, scale)
    return out


@cache
def _embeds(width: int) -> CallSite:
    return CallSite(_embed, WIDTH=width, BLOCK=BLOCK, num_warps=4)


# Ids are a part of what a step uploads, at any alignment: nothing is compiled while serving.
@triton.jit(do_not_specialize=["first", "scale"], do_not_specialize_on_alignment=["ids"])
def _embed(ids, weight, out, first, num_rows, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + t) - first
    there = tl.where((row >= 0) & (row < num_rows), WIDTH, 0)
    x = tl.load(weight + row * WIDTH + i, mask=i < there, other=0.0).to(tl.float32) * scale
    tl.store(out + t * WIDTH + i, x.to(out.dtype.element_ty), mask=i < WIDTH)
