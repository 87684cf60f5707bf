"""Input tensors of a step of decodes, from integers that are on the device already."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LayOutDecodesLike(Protocol):
    """Type of `lay_out_decodes` and of other implementations of it."""

    def __call__(
        self,
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
    ) -> Tensor: ...


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
    """Write the page table's new entries; replace negative input_ids [n] by the last tokens of their rows; in
    lens [n] positions + 1, a row's tokens with its new one. Returns the KV slots [n] of the new tokens.

    Token i goes to position positions[i] of row rows[i]; page_table.flatten()[entries[j]] = pages[j] for all
    j of [m]. All int64, but page_table, int32 contiguous. An entry that comes twice has the same page both
    times.
    """
    page_table.view(-1)[entries] = pages.int()
    input_ids.copy_(torch.where(input_ids < 0, last_token[rows], input_ids))
    torch.add(positions, 1, out=lens)
    return page_table[rows, positions // page_size].long() * page_size + positions % page_size
