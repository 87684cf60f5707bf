"""What a step of decodes needs before its forward, from integers that are on the device already.

write_pages        the page table's new entries
resolve_decodes    last tokens for the ids that only the device knows; the slots the new keys go to
"""

from __future__ import annotations

import torch
from torch import Tensor

# Triton is imported where a GPU is used, and only there: a CPU needs none.


def write_pages(page_table: Tensor, entries: Tensor, pages: Tensor) -> None:
    """page_table.flatten()[entries[i]] = pages[i], in place; page_table int32 contiguous, entries and pages
    [n] int64. An entry that comes twice has the same page both times.
    """
    if page_table.is_cuda:
        from model_worker.kernels.triton import decode_inputs as triton_kernels

        triton_kernels.write_pages(page_table, entries, pages)
        return
    page_table.view(-1)[entries] = pages.int()


def resolve_decodes(
    input_ids: Tensor,
    rows: Tensor,
    positions: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    page_size: int,
) -> Tensor:
    """Replace negative input_ids [n] by the last tokens of their rows, in place; returns KV slots [n].

    Token i goes to position positions[i] of row rows[i]; all int64, page_table int32 contiguous.
    """
    if input_ids.is_cuda:
        from model_worker.kernels.triton import decode_inputs as triton_kernels

        return triton_kernels.resolve_decodes(input_ids, rows, positions, last_token, page_table, page_size)
    input_ids.copy_(torch.where(input_ids < 0, last_token[rows], input_ids))
    return page_table[rows, positions // page_size].long() * page_size + positions % page_size
