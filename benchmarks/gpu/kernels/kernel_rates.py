"""Kernels compared with a device's limits: decodes and draws with its copy rate, prompts with its matrix
product rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.kernels.launches import count_launches
from benchmarks.gpu.timing import recorded_ms
from model_worker.device.base import Device
from model_worker.kernels.fp8_rows import FP8
from model_worker.kernels.triton.decode_attention import choose_num_splits, decode_attention
from model_worker.kernels.triton.extend_attention import extend_attention
from model_worker.kernels.triton.new_tokens import NewTokens
from model_worker.kernels.triton.tiles import DecodeTile, ExtendTile
from model_worker.sampling.columns import SamplingColumns
from model_worker.sampling.triton.draw import draw
from runtime.sampling.features import TRUNCATES
from runtime.wire.plan import RowSetup
from runtime.wire.sampling_params import SamplingParams

DRAWS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
}
LOGITS = {"peaked": 4.0, "flat": 0.01}
"""Standard deviation of the logits."""


class HeadShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B = HeadShape(32, 8, 128)
BEYOND_CACHES = 256 << 20
"""Bytes that exceed a GPU's caches. A Hopper GPU's second-level cache has 50 MB."""
MAX_LAYERS = 48


@dataclass(frozen=True)
class Setting:
    """Shapes for measuring attention."""

    device: Device
    dtype: torch.dtype
    repeats: int
    heads: HeadShape = LLAMA_8B
    narrow_kv: bool = False  # keys and values in float8

    @property
    def kv_dtype(self) -> torch.dtype:
        return FP8 if self.narrow_kv else self.dtype

    @property
    def at(self) -> torch.device:
        return self.device.torch_device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.at, dtype=self.dtype)


class Pages(NamedTuple):
    k_pool: Tensor
    v_pool: Tensor
    page_table: Tensor
    rows: Tensor


def _pages(batch: int, context: int, page_size: int, setting: Setting) -> Pages:
    """Return random keys and values on scattered pages."""
    per_row = -(-context // page_size)
    num_slots = (batch * per_row + 1) * page_size
    pools = setting.normal(2, num_slots, *setting.heads[1:]).to(setting.kv_dtype)
    table = 1 + torch.randperm(batch * per_row, device=setting.at).view(batch, per_row)
    return Pages(pools[0], pools[1], table.int(), torch.arange(batch, device=setting.at))


class DecodeWork:
    """Attention of one new token of each of `batch` sequences, including its rotation and storing."""

    def __init__(self, batch: int, context: int, page_size: int, setting: Setting) -> None:
        """context: tokens of each sequence, including the new one."""
        num_heads, num_kv_heads, head_dim = setting.heads
        device = setting.at
        pages = _pages(batch, context, page_size, setting)
        self._q = setting.normal(batch, num_heads, head_dim)
        k, v = setting.normal(2, batch, num_kv_heads, head_dim).unbind(0)
        page, offset = divmod(context - 1, page_size)
        slots = pages.page_table[:, page].long() * page_size + offset
        self._new = NewTokens(k, v, slots, torch.rand(batch, head_dim, device=device), norms=None)
        self._lens = torch.full((batch,), context, device=device)
        self._page_size = page_size
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.splits = choose_num_splits(batch, num_kv_heads, context, processors)
        self.out = torch.empty_like(self._q)
        self.num_bytes = 2 * batch * context * num_kv_heads * head_dim * setting.kv_dtype.itemsize  # read
        layers = [pages]
        if device.type == "cuda":
            # The same values in other memory, like the next layer's; else they would come from the cache.
            copies = min(MAX_LAYERS, BEYOND_CACHES // self.num_bytes)
            layers += [
                pages._replace(k_pool=pages.k_pool.clone(), v_pool=pages.v_pool.clone())
                for _ in range(copies)
            ]
        self._layers = cycle(layers)

    def run(self, tile: DecodeTile | None = None, splits: int | None = None) -> None:
        """Run the kernel. tile, splits: None: as a server would choose."""
        decode_attention(
            self._q,
            *next(self._layers),
            self._lens,
            page_size=self._page_size,
            scale=self._q.shape[2] ** -0.5,
            num_splits=splits or self.splits,
            new=self._new,
            tile=tile,
            out=self.out,
        )


class ExtendWork:
    """Attention of a chunk of each of some prompts, after its cached part."""

    def __init__(
        self, num_new: int, num_cached: int, page_size: int, setting: Setting, num_seqs: int = 1
    ) -> None:
        """num_new, num_cached: tokens of each prompt."""
        length, (num_heads, _, head_dim) = num_new + num_cached, setting.heads
        self.num_new, self.num_cached, self.num_seqs = num_new, num_cached, num_seqs
        self.page_size = page_size
        self.scale = head_dim**-0.5
        self.pages = _pages(num_seqs, length, page_size, setting)
        self.q = setting.normal(num_seqs * num_new, num_heads, head_dim)
        self.starts = num_new * torch.arange(num_seqs + 1, device=setting.at, dtype=torch.int32)
        self.lens = torch.full((num_seqs,), length, device=setting.at, dtype=torch.int32)
        self.out = torch.empty_like(self.q)
        # Two products, without masked elements.
        self.operations = 4 * num_heads * head_dim * num_seqs * num_new * (num_cached + num_new / 2)

    def run(self, tile: ExtendTile | None = None) -> None:
        extend_attention(
            self.q,
            *self.pages,
            self.lens,
            self.starts,
            page_size=self.page_size,
            scale=self.scale,
            tile=tile,
            out=self.out,
        )


def decode_rate(batch: int, context: int, page_size: int, setting: Setting) -> dict[str, Any]:
    """Return the bytes of keys and values per second, and the time of a launch."""
    work = DecodeWork(batch, context, page_size, setting)
    ms = recorded_ms(work.run, setting.device, setting.repeats)
    return {"batch": batch, "context": context, "page_size": page_size, "splits": work.splits, "ms": ms,
            "bytes_per_s": work.num_bytes / (ms * 1e-3)}  # fmt: skip


def extend_rate(num_tokens: int, page_size: int, setting: Setting) -> dict[str, Any]:
    """Return the operations per second of causal attention over one prompt."""
    work = ExtendWork(num_tokens, 0, page_size, setting)
    ms = recorded_ms(work.run, setting.device, setting.repeats)
    return {
        "tokens": num_tokens,
        "page_size": page_size,
        "ms": ms,
        "operations_per_s": work.operations / (ms * 1e-3),
    }


def draw_rate(
    batch: int, kind: str, shape: str, vocab_size: int, device: Device, repeats: int
) -> dict[str, Any]:
    """Return the time of a recorded draw, its launches, and the bytes of its logits per second."""
    at = device.torch_device
    columns = SamplingColumns(batch, vocab_size, device)
    columns.open_rows([RowSetup.of(row, 1, SamplingParams(seed=row, **DRAWS[kind])) for row in range(batch)])
    logits = LOGITS[shape] * torch.randn(batch, vocab_size, device=at)
    rows = torch.arange(batch, device=at)
    tokens, last_token = torch.empty_like(rows), torch.empty(batch + 1, dtype=torch.int64, device=at)
    truncates = bool((columns.features & TRUNCATES).any())

    def work() -> None:
        draw(logits, rows, rows, columns, truncates=truncates, out=tokens, last_token=last_token)

    with count_launches() as launches:
        work()

    ms = recorded_ms(work, device, repeats)
    return {"batch": batch, "draw": kind, "logits": shape, "us": 1e3 * ms, "launches": len(launches.names),
            "bytes_per_s": logits.nbytes / (ms * 1e-3)}  # fmt: skip
