"""What a step of decodes needs before its forward, in two launches; see model_worker.kernels.decode_inputs.

grid   block of tokens

Two launches, because a token may read an entry that another program writes. All of it is some kilobytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def write_pages(page_table: Tensor, entries: Tensor, pages: Tensor) -> None:
    """As model_worker.kernels.decode_inputs.write_pages."""
    n = len(entries)
    if n:
        _write_pages[(triton.cdiv(n, BLOCK),)](page_table, entries, pages, n, BLOCK=BLOCK, num_warps=4)


def resolve_decodes(
    input_ids: Tensor,
    rows: Tensor,
    positions: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    page_size: int,
) -> Tensor:
    """As model_worker.kernels.decode_inputs.resolve_decodes."""
    n = len(input_ids)
    slots = torch.empty(n, dtype=torch.int64, device=input_ids.device)
    if n:
        _resolve_decodes[(triton.cdiv(n, BLOCK),)](
            input_ids, rows, positions, last_token, page_table, slots, n, page_table.stride(0),
            PAGE_SIZE=page_size, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return slots


@triton.jit
def _write_pages(page_table, entries, pages, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    entry = tl.load(entries + i, mask=inside, other=0)
    page = tl.load(pages + i, mask=inside, other=0)
    tl.store(page_table + entry, page.to(tl.int32), mask=inside)


@triton.jit
def _resolve_decodes(
    input_ids, rows, positions, last_token, page_table, slots, n, table_stride, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    token = tl.load(input_ids + i, mask=inside, other=0)
    row = tl.load(rows + i, mask=inside, other=0)
    position = tl.load(positions + i, mask=inside, other=0)
    last = tl.load(last_token + row, mask=inside & (token < 0), other=0)
    tl.store(input_ids + i, tl.where(token < 0, last, token), mask=inside)
    page = tl.load(page_table + row * table_stride + position // PAGE_SIZE, mask=inside, other=0)
    tl.store(slots + i, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=inside)
