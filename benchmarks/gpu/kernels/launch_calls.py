"""Launches of a decode step and of a step with a chunk, as the worker makes them, over random tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from model_worker.device.base import Device
from model_worker.kernels.rms_norm import HeadNorms
from model_worker.kernels.triton.activation import activate_and_mul
from model_worker.kernels.triton.decode_attention import decode_attention
from model_worker.kernels.triton.decode_inputs import lay_out_decodes
from model_worker.kernels.triton.embedding import embed
from model_worker.kernels.triton.expert_choice import choose_experts
from model_worker.kernels.triton.experts import fused_experts
from model_worker.kernels.triton.extend_attention import extend_attention
from model_worker.kernels.triton.new_tokens import NewTokens
from model_worker.kernels.triton.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.kernels.triton.rope import rope_cos_sin
from model_worker.kernels.triton.rope_kv_store import rope_and_store_kv
from model_worker.kernels.triton.top_logprobs import top_logprobs
from model_worker.sampling.columns import SamplingColumns
from model_worker.sampling.triton import logit_edits
from model_worker.sampling.triton.draw import draw
from runtime.wire.plan import RowSetup
from runtime.wire.sampling_params import SamplingParams

Calls = dict[str, Callable[[], object]]

PAGE_SIZE = 16
EPS = 1e-5
LAYERS = {
    "decode layer": {"decode attention": 1, "add and norm": 2, "activation": 1},
    "decode layer, normed heads": {"decode attention, normed heads": 1, "add and norm": 2, "activation": 1},
    "decode layer, experts": {"decode attention": 1, "add and norm": 2, "expert choice": 1, "experts": 1},
    "chunk layer": {"rope and store": 1, "extend attention": 1, "add and norm": 2, "activation": 1},
}
"""Number of times that a layer makes each call. Its matrix products, which are torch's, are not included."""


@dataclass(frozen=True)
class CallSizes:
    """Shapes of Llama-3.1-8B. Experts are few and small, because the host's time does not depend on them."""

    batch: int = 8
    chunk: int = 64
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 14336
    vocab_size: int = 128_256
    num_experts: int = 8
    expert_width: int = 256


LLAMA_8B = CallSizes()
TINY = CallSizes(1, 2, 4, 2, 16, 32, 48, 300, 4, 32)


class _Tensors:
    """Random tensors of one dtype. Weights are parameters, as in a model."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self.at = device.torch_device
        self.dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.at, dtype=self.dtype)

    def weight(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(self.normal(*shape), requires_grad=False)

    def floats(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.at)

    def ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.at)

    def numbers(self, count: int) -> Tensor:
        return torch.arange(count, device=self.at)


def launch_calls(device: Device, dtype: torch.dtype, sizes: CallSizes) -> Calls:
    """Return the worker's calls by name, ready to be called any number of times."""
    tensors = _Tensors(device, dtype)
    parts = (_attention(tensors, sizes), _layers(tensors, sizes), _sampling(tensors, sizes, device))
    return {name: run for part in parts for name, run in part}


def _attention(tensors: _Tensors, sizes: CallSizes) -> Iterator[tuple[str, Callable[[], object]]]:
    batch, chunk, head_dim = sizes.batch, sizes.chunk, sizes.head_dim
    num_heads, num_kv_heads = sizes.num_heads, sizes.num_kv_heads
    num_pages = -(-chunk // PAGE_SIZE)
    pools = tensors.normal(2, (1 + max(batch, num_pages)) * PAGE_SIZE, num_kv_heads, head_dim)
    k_pool, v_pool = pools.unbind()
    table = tensors.ints(batch + 1, num_pages)
    norms = HeadNorms(tensors.weight(head_dim), tensors.weight(head_dim), EPS)
    rows, most = tensors.numbers(batch), max(batch, chunk)
    # Queries, keys and values are views of one product, as a layer has them.
    qkv = tensors.normal(most, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
    cos_sin, slots, out = tensors.floats(most, head_dim), tensors.numbers(most), torch.empty_like(q)
    lens, scale = tensors.numbers(batch) + 1, head_dim**-0.5

    def decode(head_norms: HeadNorms | None, num_splits: int) -> None:
        new = NewTokens(k, v, slots, cos_sin, head_norms)
        decode_attention(
            q, k_pool, v_pool, table, rows, lens, num_splits=num_splits, new=new, out=out,
            page_size=PAGE_SIZE, scale=scale,
        )  # fmt: skip

    yield "decode attention", partial(decode, None, 1)
    yield "decode attention, normed heads", partial(decode, norms, 1)
    yield "decode attention, two splits", partial(decode, None, 2)
    new = (q[:chunk], k[:chunk], v[:chunk], cos_sin[:chunk], k_pool, v_pool, slots[:chunk])
    yield "rope and store", partial(rope_and_store_kv, *new)
    yield "norm, rope and store", partial(rope_and_store_kv, *new, norms)
    starts = torch.tensor([0, chunk], dtype=torch.int32, device=tensors.at)
    yield "extend attention", partial(
        extend_attention, q[:chunk], k_pool, v_pool, table, rows[:1], starts[1:], starts, out=out[:chunk],
        page_size=PAGE_SIZE, scale=scale,
    )  # fmt: skip


def _layers(tensors: _Tensors, sizes: CallSizes) -> Iterator[tuple[str, Callable[[], object]]]:
    batch, hidden, width = sizes.batch, sizes.hidden, sizes.expert_width
    ids, page_table = tensors.numbers(batch), tensors.ints(batch + 1, 4)
    yield (
        "decode inputs",
        lambda: lay_out_decodes(
            ids, ids, ids, ids, ids, ids, page_table, PAGE_SIZE, lens=torch.empty_like(ids)
        ),
    )
    yield "embedding", partial(embed, ids, tensors.weight(batch, hidden), first=0, scale=1.0)
    yield "cosines and sines", partial(rope_cos_sin, ids, tensors.floats(sizes.head_dim // 2))
    x, weight = tensors.normal(batch, hidden), tensors.weight(hidden)
    yield "norm", partial(rms_norm, x, weight, EPS)
    yield "add and norm", partial(fused_add_rms_norm, x, torch.zeros_like(x), weight, EPS)
    gate_up = tensors.normal(batch, 2 * sizes.intermediate)
    yield "activation", partial(activate_and_mul, "silu", gate_up)
    scores, few = tensors.normal(batch, sizes.num_experts), tensors.normal(batch, width)
    yield "expert choice", partial(choose_experts, scores, 2, renormalizes=True)
    gate_up_proj = tensors.weight(sizes.num_experts, 2 * width, width)
    down_proj = tensors.weight(sizes.num_experts, width, width)
    chosen = (tensors.normal(batch, 2), tensors.ints(batch, 2))
    activate = partial(activate_and_mul, "silu")
    yield "experts", partial(fused_experts, few, gate_up_proj, down_proj, *chosen, activate)


def _sampling(
    tensors: _Tensors, sizes: CallSizes, device: Device
) -> Iterator[tuple[str, Callable[[], object]]]:
    batch, vocab_size = sizes.batch, sizes.vocab_size
    columns = SamplingColumns(batch, vocab_size, device)
    columns.open_rows([RowSetup.of(row, 1, SamplingParams(seed=row, top_p=0.9)) for row in range(batch)])
    logits, rows = tensors.floats(batch, vocab_size), tensors.numbers(batch)
    tokens, last_token = torch.empty_like(rows), tensors.numbers(batch + 1)
    drawn = partial(draw, logits, rows, rows, columns, out=tokens, last_token=last_token)
    yield "draw", partial(drawn, truncates=False)
    yield "truncation and draw", partial(drawn, truncates=True)
    counts = tensors.ints(batch + 1, vocab_size)
    yield "penalties", partial(logit_edits.penalize, logits, rows, counts, columns)
    yield "count of tokens", partial(logit_edits.count_tokens, counts, rows, rows, columns)
    listed = tensors.ints(batch + 1, 2, 4)
    yield "logit bias", partial(logit_edits.add_bias, logits, rows, listed)
    below = (rows, rows, listed[:, :1], columns.min_len)
    yield "minimum length", partial(logit_edits.forbid_below, logits, *below)
    words = ~tensors.ints(batch, -(-vocab_size // 32))
    yield "masks", partial(logit_edits.forbid_masked, logits, rows.int(), words)
    yield "logprobs", partial(top_logprobs, logits, rows, 5)
