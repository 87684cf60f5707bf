"""Inputs of a step of decodes; see model_worker.kernels.decode_inputs.

grid   block of tokens

A token may read any new entry of the page table, so each program writes all of them, which are as many as
tokens at most: none waits for another, and there is one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def lay_out_decodes(
    input_ids: Tensor,
    rows: Tensor,
    positions: Tensor,
    entries: Tensor,
    pages: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    page_size: int,
    *,
    lens: Tensor,
) -> Tensor:
    """Do what model_worker.kernels.decode_inputs.lay_out_decodes does; without tokens nothing is written."""
    n = len(input_ids)
    slots = torch.empty(n, dtype=torch.int64, device=input_ids.device)
    if n:
        _lay_out[(triton.cdiv(n, BLOCK),)](
            input_ids, rows, positions, entries, pages, last_token, page_table, lens, slots, n,
            len(entries), page_table.stride(0), PAGE_SIZE=page_size, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return slots


@triton.jit
def _lay_out(
    input_ids, rows, positions, entries, pages, last_token, page_table, lens, slots, n, num_entries,
    table_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, num_entries, BLOCK):
        j = start + tl.arange(0, BLOCK)
        entry = tl.load(entries + j, mask=j < num_entries, other=0)
        page = tl.load(pages + j, mask=j < num_entries, other=0)
        tl.store(page_table + entry, page.to(tl.int32), mask=j < num_entries)
    tl.debug_barrier()  # a token's entry may have been written by another thread
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    token = tl.load(input_ids + i, mask=inside, other=0)
    row = tl.load(rows + i, mask=inside, other=0)
    position = tl.load(positions + i, mask=inside, other=0)
    last = tl.load(last_token + row, mask=inside & (token < 0), other=0)
    tl.store(input_ids + i, tl.where(token < 0, last, token), mask=inside)
    tl.store(lens + i, position + 1, mask=inside)
    page = tl.load(page_table + row * table_stride + position // PAGE_SIZE, mask=inside, other=0)
    tl.store(slots + i, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=inside)
