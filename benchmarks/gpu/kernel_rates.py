"""How near attention comes to what the device can do: decodes to its copy rate, prompts to its matrices'."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.timing import median_ms
from model_worker.kernels.triton.decode_attention import choose_num_splits, decode_attention
from model_worker.kernels.triton.extend_attention import BLOCK_M, extend_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128  # of Llama-3.1-8B


class Pages(NamedTuple):
    k_pool: Tensor
    v_pool: Tensor
    page_table: Tensor
    rows: Tensor


def _pages(batch: int, context: int, page_size: int, device: torch.device, dtype: torch.dtype) -> Pages:
    """Random keys and values on scattered pages."""
    per_row = -(-context // page_size)
    num_slots = (batch * per_row + 1) * page_size
    pools = torch.randn(2, num_slots, NUM_KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
    table = 1 + torch.randperm(batch * per_row, device=device).view(batch, per_row)
    return Pages(pools[0], pools[1], table.int(), torch.arange(batch, device=device))


def decode_rate(
    batch: int, context: int, page_size: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    """Bytes of keys and values per second, and the time of a launch."""
    pages = _pages(batch, context, page_size, device, dtype)
    q = torch.randn(batch, NUM_HEADS, HEAD_DIM, device=device, dtype=dtype)
    out, lens = torch.empty_like(q), torch.full((batch,), context, device=device)
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = choose_num_splits(batch, NUM_KV_HEADS, context, processors)

    def work() -> None:
        decode_attention(
            q, *pages, lens, page_size=page_size, scale=HEAD_DIM**-0.5, num_splits=splits, out=out
        )

    ms = median_ms(work, device, repeats)
    num_bytes = 2 * batch * context * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    return {"batch": batch, "context": context, "page_size": page_size, "splits": splits, "ms": ms,
            "bytes_per_s": num_bytes / (ms * 1e-3)}  # fmt: skip


def extend_rate(
    num_tokens: int, page_size: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    """Operations per second of causal attention over one prompt, masked ones not counted."""
    pages = _pages(1, num_tokens, page_size, device, dtype)
    q = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, device=device, dtype=dtype)
    out = torch.empty_like(q)
    starts = torch.tensor([0, num_tokens], device=device, dtype=torch.int32)
    lens = torch.tensor([num_tokens], device=device, dtype=torch.int32)
    tiles = torch.tensor([(0, at) for at in range(0, num_tokens, BLOCK_M)], device=device, dtype=torch.int32)

    def work() -> None:
        extend_attention(
            q, *pages, lens, starts, tiles, page_size=page_size, scale=HEAD_DIM**-0.5, sliding_window=None,
            softcap=0.0, out=out,
        )  # fmt: skip

    ms = median_ms(work, device, repeats)
    operations = 2 * num_tokens**2 * NUM_HEADS * HEAD_DIM  # two products, half of each masked
    return {
        "tokens": num_tokens,
        "page_size": page_size,
        "ms": ms,
        "operations_per_s": operations / (ms * 1e-3),
    }
