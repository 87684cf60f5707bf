"""The Triton kernels on the hardware, in bfloat16 too, which the interpreter cannot compute.

Each against the same reference as in tests/cpu/triton, computed on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.attention.triton import TritonAttention
from model_worker.device import make_device
from model_worker.device.base import Device
from model_worker.device.cuda import has_fp8
from model_worker.kernels.activation import activate_and_mul
from model_worker.kernels.fp8_linear import REFUSALS, Fp8Linear
from model_worker.kernels.fp8_rows import FP8, quantize_rows_fp8
from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.kernels.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.kernels.rope import apply_rope, rope_cos_sin
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.ops.triton_functions import BY_TRITON
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.sampler import Sampler
from model_worker.sampling.step import StepSample
from runtime.wire.format import pack_ids
from tests.cpu.triton.draw_cases import CASES, SETUPS, logits_of
from tests.cpu.triton.test_triton_attention import dense
from tests.cpu.triton.test_triton_experts import reference as experts_reference
from tests.harness.pretended_gpu import is_pretended
from tests.harness.row_setups import Row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

silu_and_mul = partial(activate_and_mul, "silu")

# Of values around 1: bfloat16 has 8 bits of mantissa, and sums are in float32.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NEAREST = {**TOLERANCE, torch.float8_e4m3fn: 0.07}  # three bits of mantissa: a sixteenth
VOCAB = 4099 if is_pretended() else 32003


@pytest.fixture(scope="module")
def device() -> Device:
    return make_device("cuda", threaded=False)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.cpu().double(), expected.double(), atol=tolerance, rtol=tolerance)


def attend(
    backend: object,
    device: Device,
    dtype: torch.dtype,
    kept: torch.dtype,
    layer: AttentionLayer,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """(got, expected of the keys and values in the pool) of decodes, and chunks behind cached prefixes."""
    at = device.torch_device
    num_new, cached = [1, 1, 130, 5], [700, 3, 70, 0]
    kv_lens = [new + old for new, old in zip(num_new, cached, strict=True)]
    max_pages = -(-max(kv_lens) // page_size)
    pool = MHATokenToKVPool(4 * max_pages, page_size, 1, layer.num_kv_heads, layer.head_dim, kept, at)
    order = 1 + torch.randperm(4 * max_pages, generator=torch.Generator().manual_seed(1))
    page_table = order.view(4, max_pages).int()
    heads = layer.num_heads + 2 * layer.num_kv_heads
    new_qkv = normal(sum(num_new), heads, layer.head_dim, seed=2).to(dtype)
    old_kv = normal(2, sum(cached), layer.num_kv_heads, layer.head_dim, seed=3).to(dtype)

    def slots_of(counts: list[int], firsts: list[int]) -> Tensor:
        rows = torch.arange(4).repeat_interleave(torch.tensor(counts))
        places = torch.cat([torch.arange(n) + first for n, first in zip(counts, firsts, strict=True)])
        return page_table[rows, places // page_size].long() * page_size + places % page_size

    for buffer, values in zip(pool.layer(0), old_kv, strict=True):
        buffer[slots_of(cached, [0] * 4).to(at)] = values.to(kept).to(at)
    starts = [0, *np.cumsum(num_new).tolist()]
    positions = torch.cat([torch.arange(n) + old for n, old in zip(num_new, cached, strict=True)])
    batch = ForwardBatch(
        input_ids=positions.to(at),
        positions=positions.to(at),
        out_slots=slots_of(num_new, cached).to(at),
        query_start=starts,
        kv_lens=kv_lens,
        rows=torch.arange(4, device=at),
        page_table=page_table.to(at),
        page_size=page_size,
        num_decodes=2,
        output_indices=positions[:0].to(at),
    )
    inverse = 1.0 / 10000 ** (torch.arange(0, layer.head_dim, 2) / layer.head_dim)
    cos_sin = rope_cos_sin(positions, inverse)
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    backend.prepare(batch)  # type: ignore[attr-defined]
    q, k, v = new_qkv.to(at, copy=True).split(sizes, dim=1)
    inputs = AttentionInputs(q, k, v, cos_sin.to(at))
    got = backend.forward(layer, inputs, batch, pool)  # type: ignore[attr-defined]
    q, k, v = new_qkv.split(sizes, dim=1)
    q, k = apply_rope(q, k, cos_sin)
    stored = [by * each.float().cpu() for by, each in zip(layer.kv_scale, pool.layer(0), strict=True)]
    for kept_new, new in zip(stored, (k, v), strict=True):
        assert_close(kept_new[slots_of(num_new, cached)], new.float(), NEAREST[kept])
    parts = []
    for b, kv_len in enumerate(kv_lens):
        new, row = slice(starts[b], starts[b + 1]), torch.arange(kv_len)
        slots = page_table[b, row // page_size].long() * page_size + row % page_size
        keys, values = (each[slots] for each in stored)
        parts.append(dense(q[new], keys, values, layer.scale, layer.sliding_window, layer.softcap or 0.0))
    return got, torch.cat(parts)


LAYERS = {
    "llama-3.1-8b": AttentionLayer(0, *((8, 2) if is_pretended() else (32, 8)), 128, 128**-0.5, None),
    "window and soft-cap": AttentionLayer(0, 8, 4, 256, 0.0625, 100, 30.0),
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention(name: str, page_size: int, dtype: torch.dtype, device: Device) -> None:
    got, expected = attend(TritonAttention(), device, dtype, dtype, LAYERS[name], page_size)
    assert_close(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("scale", [UNSCALED, KVScale(0.37, 2.5)])
def test_attention_over_keys_of_eight_bits(scale: KVScale, device: Device) -> None:
    if not has_fp8():
        pytest.skip("float8 needs compute capability 8.9")
    layer = replace(LAYERS["llama-3.1-8b"], kv_scale=scale)
    got, expected = attend(TritonAttention(), device, torch.bfloat16, torch.float8_e4m3fn, layer, 16)
    assert_close(got, expected, TOLERANCE[torch.bfloat16])


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs flashinfer")
@pytest.mark.parametrize("name", LAYERS)
def test_flashinfer(name: str, device: Device) -> None:
    from model_worker.attention.flashinfer import FlashInferAttention

    got, expected = attend(FlashInferAttention(), device, torch.bfloat16, torch.bfloat16, LAYERS[name], 16)
    assert_close(got, expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_and_gate(dtype: torch.dtype, device: Device) -> None:
    at, tolerance = device.torch_device, TOLERANCE[dtype]
    x, update, weight = (normal(5, 4096, seed=seed).to(dtype) for seed in range(3))
    weight = weight[0]
    assert_close(BY_TRITON.rms_norm(x.to(at), weight.to(at), 1e-5), rms_norm(x, weight, 1e-5), tolerance)
    residual, residual_there = x.clone(), x.to(at, copy=True)
    expected = fused_add_rms_norm(residual, update, weight, 1e-5)
    got = BY_TRITON.fused_add_rms_norm(residual_there, update.to(at), weight.to(at), 1e-5)
    assert_close(got, expected, tolerance)
    assert_close(residual_there, residual, tolerance)
    assert_close(BY_TRITON.activate_and_mul("silu", x.to(at)), silu_and_mul(x), tolerance)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_experts(stored: torch.dtype, device: Device) -> None:
    from model_worker.kernels.triton.experts import fused_experts

    at, is_narrow = device.torch_device, stored.itemsize == 1
    if is_narrow and not has_fp8():
        pytest.skip("float8 needs compute capability 8.9")

    def weight(*shape: int, seed: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """(as stored, its scales, what it stands for), all on the GPU but the last."""
        values = normal(*shape, seed=seed)
        scale = torch.full((*shape[:2], 1), shape[2] ** -0.5)
        if not is_narrow:
            return (values * scale).to(stored).to(at), None, (values * scale).to(stored)
        return values.to(stored).to(at), scale.to(at), values.to(stored).float() * scale

    gate_up, gate_up_scale, wide_gate_up = weight(8, 384, 256, seed=1)
    down, down_scale, wide_down = weight(8, 256, 192, seed=2)
    hidden = normal(50, 256, seed=3).bfloat16()
    chosen, ids = normal(50, 8, seed=4).softmax(1).topk(3, dim=1)
    weights = chosen.bfloat16()
    got = fused_experts(
        hidden.to(at), gate_up, down, weights.to(at), ids.to(at), partial(BY_TRITON.activate_and_mul, "silu"),
        gate_up_scale=gate_up_scale, down_scale=down_scale,
    )  # fmt: skip
    expected = experts_reference(hidden, wide_gate_up, wide_down, weights, ids)
    assert_close(got, expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(("rows", "is_refused"), [(1, False), (3, False), (17, False), (17, True)])
def test_a_linear_layer_of_eight_bits(rows: int, is_refused: bool, device: Device) -> None:
    """The layer is computed as the library takes it, which may refuse few rows, and as if it refused."""
    if not has_fp8():
        pytest.skip("float8 needs compute capability 8.9")
    at, x, bias = device.torch_device, normal(rows, 256, seed=1).bfloat16(), normal(384, seed=2).bfloat16()
    weight, scale = normal(384, 256, seed=3).to(FP8), 0.05 * normal(384, 1, seed=4).abs()
    multiply = Fp8Linear(BY_TRITON.quantize_rows_fp8, BY_TRITON.scale_product)
    if is_refused:
        multiply.note_refusal(RuntimeError(REFUSALS[0]), rows, weight.shape)
    got = multiply(x.to(at), weight.to(at), scale.to(at), bias.to(at))
    quantized, x_scale = quantize_rows_fp8(x)
    expected = (quantized.float() * x_scale) @ (weight.float() * scale).T + bias.float()
    assert_close(got, expected, TOLERANCE[torch.bfloat16])


def test_what_the_sampler_edits_draws_and_reports_is_the_cpus(device: Device) -> None:
    """Every kind of row in one batch, twice, so that the second step counts the first one's tokens."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 7, "num_logprobs": 0},
        {"top_p": 0.6, "num_logprobs": 20},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5, "num_logprobs": 5},
        {"bias_ids": pack_ids([5, VOCAB - 4]), "bias_values": np.array([40.0, -9.0], np.float32).tobytes()},
        {"stop_ids": pack_ids([7, 8]), "min_len": 100, "temperature": 0.0},
    ]
    setups = [
        Row(row=row, num_prompt=4, seed=row + 5, history_ids=pack_ids([3, 1, 4, 1]), **kind)
        for row, kind in enumerate(kinds)
    ]
    rows = np.arange(len(kinds))
    half = np.random.default_rng(1).integers(0, 256, 4 * -(-VOCAB // 32), np.uint8).tobytes()
    masks = {0: [half], 3: [half[:400]]}

    def steps(where: Device) -> list[StepSample]:
        sampler = Sampler(where, max_rows=16, max_len=64, vocab_size=VOCAB)
        sampler.open_rows([s.setup() for s in setups])
        there = torch.from_numpy(rows).to(where.torch_device)
        done = []
        for step in range(2):
            logits = 4.0 * normal(len(kinds), VOCAB, seed=step)
            logits[7, 7] = 99.0
            position = rows * 0 + 30 + step
            who = SampleRows(there, torch.from_numpy(position).to(where.torch_device), rows, position)
            done.append(sampler.sample(logits.to(where.torch_device), who, masks))
        return done

    with torch.inference_mode():
        for on_gpu, on_cpu in zip(steps(device), steps(make_device("cpu", threaded=False)), strict=True):
            # The logarithms of the noise may differ in their last bit.
            assert (on_gpu.tokens.cpu() != on_cpu.tokens).sum() <= 1
            assert on_gpu.logprobs is not None
            assert on_cpu.logprobs is not None
            assert torch.equal(on_gpu.logprobs.top_ids.cpu(), on_cpu.logprobs.top_ids)
            assert_close(on_gpu.logprobs.top, on_cpu.logprobs.top, 1e-4)


@pytest.mark.parametrize("vocab_size", [VOCAB, *([] if is_pretended() else [151_936])])
@pytest.mark.parametrize("case", CASES)
def test_draws_are_the_cpus(case: str, vocab_size: int, device: Device) -> None:
    logits, rows = logits_of(case, vocab_size), np.arange(len(SETUPS))

    def tokens(where: Device) -> Tensor:
        sampler = Sampler(where, max_rows=16, max_len=64, vocab_size=vocab_size)
        sampler.open_rows([s.setup() for s in SETUPS])
        there = torch.from_numpy(rows).to(where.torch_device)
        who = SampleRows(there, there + 30, rows, rows + 30)
        return sampler.sample(logits.to(where.torch_device, copy=True), who, {}).tokens.cpu()

    with torch.inference_mode():
        # The logarithms of the noise, and exponentials at a border, may differ in their last bit.
        assert (tokens(device) != tokens(make_device("cpu", threaded=False))).sum() <= 1
