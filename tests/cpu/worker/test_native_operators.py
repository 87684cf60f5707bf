"""The C++ operators against their torch versions and float64; and that no row depends on the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.distributed.cut import whole
from model_worker.kernels.activation import ACTIVATIONS, activate_and_mul
from model_worker.kernels.combine import combine
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import (
    NATIVE_ACTIVATIONS,
    Activate,
    Combine,
    NativeNorm,
    NativeTakeRows,
    PackedLinear,
    RotaryAngles,
    can_pack,
    pack,
)
from model_worker.kernels.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.kernels.rope import apply_rope, rope_cos_sin
from model_worker.layers.norm import LayerNorm, RMSNorm
from model_worker.layers.weight import Weight
from model_worker.loading.loader import load_model
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.ops.native_ops import NativeOps
from model_worker.ops.torch_ops import TorchOps
from runtime.base.cpu_isa import CpuIsa, usable_isas
from runtime.checkpoint.model_config import Activation, ModelConfig
from runtime.settings.config import DEMO_MODEL
from tests.harness.models.native import (
    NATIVE_ISAS,
    native_kernels,
    needs_compiler,
)
from tests.harness.models.paged_forward import PagedForward

pytestmark = needs_compiler

# Where float32 before a rounding to bfloat16 lies near the middle of two, the results are one step (2^-7)
# apart; the norm and the gate round twice. Sums of a few hundred float32 differ by a few steps.
RTOL = {torch.float32: 3e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LINEAR_DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.fixture(params=NATIVE_ISAS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return native_kernels(request.param)


def _normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_only_fitting_shapes_are_packed() -> None:
    assert can_pack(_normal(32, 34, dtype=torch.bfloat16))
    assert not can_pack(_normal(32, 33, dtype=torch.bfloat16))  # half a word of 32 bits
    assert can_pack(_normal(32, 33))
    assert can_pack(_normal(32, 34, dtype=torch.float16))
    assert not can_pack(_normal(32, 33, dtype=torch.float16))
    assert not can_pack(_normal(32, 34, dtype=torch.float64))
    for dtype in DTYPES:
        assert can_pack(_normal(40, 34, dtype=dtype))
        assert not can_pack(_normal(2, 40, 34, dtype=dtype)[0])  # its memory is not all its own


@pytest.mark.parametrize(
    ("num_threads", "with_bias"),
    [
        (1, True),
        (3, False),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, False), (3, True))),
    ],
)
@pytest.mark.parametrize(("dtype", "out_dtype"), LINEAR_DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (16, 2),
        (48, 34),
        (80, 32),
        (112, 1056),
        (80, 4128),
        (1040, 130),
        (1040, 96),
        (1, 32),
        (97, 64),
        (151, 34),
    ],
)
@pytest.mark.parametrize("isa", usable_isas())
def test_packed_linear_equals_float64(
    isa: CpuIsa,
    shape: tuple[int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    with_bias: bool,
    num_threads: int,
) -> None:
    kernels = native_kernels(isa)
    n, k = shape
    weight = _normal(n, k, dtype=dtype)
    bias = _normal(n, dtype=dtype, seed=1) if with_bias else None
    packed = weight.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        pack(kernels, packed)
        linear = PackedLinear(kernels, packed, bias, out_dtype=out_dtype)
    finally:
        torch.set_num_threads(before)
    rows = _normal(530, k, dtype=dtype, seed=2)
    addend = torch.zeros(n, dtype=torch.float64) if bias is None else bias.double()
    expected = F.linear(rows.double(), weight.double(), addend)
    # The error of a sum is to be measured against its terms, which may cancel.
    scale = F.linear(rows.double().abs(), weight.double().abs(), addend.abs())
    together = linear(rows)
    assert together.dtype is out_dtype
    assert ((together.double() - expected).abs() / scale).max() < RTOL[
        out_dtype
    ] / 4  # rounded once, to nearest
    # 50 and 81: blocks of 32 rows, then one of 17 to 31.
    for num_rows in (0, 1, 2, 5, 6, 7, 11, 12, 13, 16, 17, 25, 32, 33, 50, 64, 81, 97, 400):
        assert torch.equal(linear(rows[:num_rows]), together[:num_rows])
        assert torch.equal(linear(rows[100 : 100 + num_rows]), together[100 : 100 + num_rows])


@pytest.mark.parametrize("value", [0.0, 1e-40, 6e-8, 65504.0, 3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_an_extreme_value_are_exact(dtype: torch.dtype, isa: CpuIsa, value: float) -> None:
    """At an even and an odd place of k. Times the zeros of other rows what is not finite is NaN. Instructions
    for pairs of bfloat16 take what is below 2^-126 for zero.
    """
    kernels = native_kernels(isa)
    weight, rows = torch.zeros(32, 6, dtype=dtype), torch.zeros(17, 6, dtype=dtype)
    weight[3, 2] = weight[5, 5] = value
    rows[0, 2] = rows[9, 5] = 1.0
    expected = F.linear(rows.double(), weight.double()).to(dtype)
    if value == 1e-40 and dtype is torch.bfloat16 and isa in ("avx512_bf16", "amx"):
        expected.zero_()
    pack(kernels, weight)
    got = PackedLinear(kernels, weight, None, out_dtype=dtype)(rows)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("width", "k"), [(16, 32), (80, 96), (1040, 1056), (80, 4128)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", usable_isas())
def test_a_gate_beside_its_product_gives_the_bits_of_the_two_operators(
    isa: CpuIsa, dtype: torch.dtype, width: int, k: int, with_bias: bool
) -> None:
    kernels = native_kernels(isa)
    weight = _normal(2 * width, k, dtype=dtype)
    bias = _normal(2 * width, dtype=dtype, seed=1) if with_bias else None
    pack(kernels, weight)
    linear = PackedLinear(kernels, weight, bias, out_dtype=dtype)
    rows = _normal(97, k, dtype=dtype, seed=2)
    for activation in NATIVE_ACTIVATIONS:
        gated = linear.gated(activation)
        assert gated is not None
        expected = Activate(kernels, activation, has_up=True)(linear(rows))
        for num_rows in (0, 1, 5, 6, 7, 16, 17, 32, 50, 97):
            assert torch.equal(gated(rows[:num_rows]), expected[:num_rows])


def test_a_gate_takes_halves_of_whole_panels_and_a_result_of_the_weights_dtype(
    kernels: NativeKernels,
) -> None:
    for n, out_dtype in ((48, torch.bfloat16), (64, torch.float32)):
        weight = torch.zeros(n, 32, dtype=torch.bfloat16)
        assert PackedLinear(kernels, weight, None, out_dtype=out_dtype).gated("silu") is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_packed_weight_are_the_weights_rows(dtype: torch.dtype, kernels: NativeKernels) -> None:
    weight = _normal(64, 34, dtype=dtype)
    packed = weight.clone()
    pack(kernels, packed)
    ids = torch.tensor([0, 63, 17, 17, 15, 16])
    take = NativeTakeRows(kernels)
    assert torch.equal(take(packed, ids, packed=True), weight[ids])
    assert take(packed, ids[:0], packed=True).shape == (0, 34)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("size", [16, 80, 896])
def test_rms_norm_equals_the_torch_version(
    size: int, rows: int, dtype: torch.dtype, kernels: NativeKernels
) -> None:
    x = _normal(rows, size, dtype=dtype)
    weight = _normal(size, dtype=dtype, seed=1)
    norm = NativeNorm(kernels, weight, 1e-6, dtype=dtype)
    torch.testing.assert_close(norm(x), rms_norm(x, weight, 1e-6), rtol=RTOL[dtype], atol=0)
    residual = _normal(rows, size, dtype=dtype, seed=2)
    expected_residual = residual.clone()
    expected = fused_add_rms_norm(expected_residual, x, weight, 1e-6)
    torch.testing.assert_close(norm(x, residual), expected, rtol=RTOL[dtype], atol=0)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_heads_of_tokens_that_lie_apart(dtype: torch.dtype, kernels: NativeKernels) -> None:
    fused = _normal(9, 7, 64, dtype=dtype)
    q = fused[:, 2:5]
    weight = _normal(64, dtype=dtype, seed=1)
    got = NativeNorm(kernels, weight, 1e-6, dtype=dtype)(q)
    torch.testing.assert_close(got, rms_norm(q, weight, 1e-6), rtol=RTOL[dtype], atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["wide", "layer", "layer_bias", "each_head"])
def test_other_norms_equal_the_layers_without_kernels(
    name: str, dtype: torch.dtype, kernels: NativeKernels
) -> None:
    size = 80
    norm: RMSNorm | LayerNorm
    if name == "wide":
        norm = RMSNorm(size, 1e-6, wide=True, dtype=dtype, device="cpu")
    else:
        shape = (whole(3), size) if name == "each_head" else size
        norm = LayerNorm(shape, 1e-5, bias=name != "layer", dtype=dtype, device="cpu")
    for seed, weight in enumerate(norm.parameters()):
        weight.data.copy_(_normal(*weight.shape, seed=seed))
    norm.bind(TorchOps())
    x = _normal(9, 5, size, dtype=dtype, seed=7)[:, 1:4] * 3 + 1
    residual, update = x[:, 0].contiguous(), x[:, 1].contiguous()
    expected = [norm(x)]
    if name != "each_head":
        expected += [norm(x[:, 0]), norm.add_and_norm(residual.clone(), update)]
    norm.bind(NativeOps(kernels))
    assert isinstance(norm.op, NativeNorm)
    # A layer norm's result is a difference, so the error is to be measured against what is subtracted.
    assert_close = partial(torch.testing.assert_close, rtol=RTOL[dtype], atol=RTOL[dtype])
    assert_close(norm(x), expected[0])
    if name != "each_head":
        assert_close(norm(x[:, 0]), expected[1])
        assert_close(norm.add_and_norm(residual, update), expected[2])
        assert torch.equal(residual, x[:, 0] + x[:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 64])
@pytest.mark.parametrize("size", [16, 80, 704])
@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
def test_activations_equal_the_torch_versions(
    activation: Activation, size: int, rows: int, dtype: torch.dtype, kernels: NativeKernels
) -> None:
    x = _normal(rows, 2 * size, dtype=dtype) * 3
    if rows:
        x[0, :4] = torch.tensor([-200.0, 200.0, -87.0, 0.0])
    atol = 1e-30 if activation == "silu" else 1e-5
    assert_close = partial(torch.testing.assert_close, rtol=RTOL[dtype], atol=atol)
    gated = Activate(kernels, activation, has_up=True)(x)
    assert_close(gated, activate_and_mul(activation, x))
    plain = Activate(kernels, activation, has_up=False)(x)
    assert_close(plain, ACTIVATIONS[activation](x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 97, 896])
def test_combinations_equal_the_torch_version(size: int, dtype: torch.dtype, kernels: NativeKernels) -> None:
    x, add = _normal(7, size, dtype=dtype) * 20, _normal(7, size, dtype=dtype, seed=1)
    native = Combine(kernels)
    assert native(x[:0], scale=2.0).shape == (0, size)
    assert torch.equal(native(x, add=add), combine(x, add=add))
    assert torch.equal(native(x, scale=0.37), combine(x, scale=0.37))
    # Of a product and a sum in one pass float32 may leave out the rounding between them.
    got, expected = native(x, scale=0.37, add=add), combine(x, scale=0.37, add=add)
    torch.testing.assert_close(got, expected, rtol=RTOL[dtype], atol=1e-5)
    got, expected = native(x, scale=0.5, cap=12.0), combine(x, scale=0.5, cap=12.0)
    torch.testing.assert_close(got, expected, rtol=RTOL[dtype], atol=1e-5)
    residual = add.clone()
    assert native(x, add=residual, out=residual) is residual
    assert torch.equal(residual, add + x)
    assert torch.equal(native(residual, scale=2.0, out=residual), (add + x) * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96])
def test_attention_rotates_as_apply_rope_does(
    head_dim: int, dtype: torch.dtype, kernels: NativeKernels
) -> None:
    layer = AttentionLayer(0, 4, 2, head_dim, head_dim**-0.5, None)
    positions = torch.arange(40)
    batch = ForwardBatch(
        input_ids=positions,
        positions=positions,
        out_slots=positions + 16,
        query_start=[0, 40],
        kv_lens=[40],
        rows=torch.tensor([0]),
        page_table=torch.tensor([[1, 2, 3]], dtype=torch.int32),
        page_size=16,
        num_decodes=0,
        output_indices=positions,
    )
    q, k, v = _normal(40, 8, head_dim, dtype=dtype).split((4, 2, 2), dim=1)
    cos_sin = rope_cos_sin(positions, 1.0 / 100.0 ** (torch.arange(head_dim // 2) / (head_dim // 2)))
    backend = CpuNativeAttention(kernels)
    backend.prepare(batch)
    pools = [MHATokenToKVPool(3, 16, 1, 2, head_dim, dtype, "cpu") for _ in range(2)]
    inside = backend.forward(layer, AttentionInputs(q, k, v, cos_sin), batch, pools[0])
    before = backend.forward(layer, AttentionInputs(*apply_rope(q, k, cos_sin), v), batch, pools[1])
    # Two products that may cancel, so the error is measured against the largest.
    error = (inside - before).abs().max() / before.abs().max()
    assert error < RTOL[dtype]
    stored = [pool.layer(0)[0][16:56] for pool in pools]
    torch.testing.assert_close(*stored, rtol=RTOL[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_are_taken_as_they_are(kernels: NativeKernels, dtype: torch.dtype, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    take = NativeTakeRows(kernels)
    torch.set_num_threads(before)
    table = _normal(90, 514, dtype=dtype)
    for count in (0, 1, 700):
        ids = torch.randint(90, (count,), generator=torch.Generator().manual_seed(count))
        assert torch.equal(take(table, ids), table[ids])


@pytest.mark.parametrize("scaled", [False, True])
def test_rotary_angles_equal_the_torch_ones_at_any_position(kernels: NativeKernels, scaled: bool) -> None:
    frequencies = 1.0 / (10_000.0 ** (torch.arange(0, 64, 2) / 64))
    amplitude = _normal(64) if scaled else None
    positions = torch.cat((torch.arange(3000), torch.tensor([131_071, 1_000_003, 4_194_303])))
    got = RotaryAngles(kernels, frequencies, amplitude)(positions)
    angles = (positions.float().unsqueeze(1) * frequencies).double()
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1)
    expected = expected if amplitude is None else expected * amplitude
    torch.testing.assert_close(got.double(), expected, rtol=1.5e-7, atol=1e-9)


def test_kernels_called_from_several_threads_at_once_do_not_meet(kernels: NativeKernels) -> None:
    """The team serves one caller at a time; the others work by themselves, and members come late."""
    weight, x = _normal(512, dtype=torch.bfloat16), _normal(4, 300, 512, dtype=torch.bfloat16)
    expected = [rms_norm(rows, weight, 1e-5) for rows in x]

    def compute(caller: int) -> None:
        norm = NativeNorm(kernels, weight, 1e-5, dtype=torch.bfloat16)
        for _ in range(200):
            torch.testing.assert_close(norm(x[caller]), expected[caller], rtol=RTOL[torch.bfloat16], atol=0)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(len(x)) as callers:
            for done in [callers.submit(compute, caller) for caller in range(len(x))]:
                done.result()
    finally:
        torch.set_num_threads(before)


def test_a_packed_weight_cannot_be_loaded_again(kernels: NativeKernels) -> None:
    model = load_model(DEMO_MODEL, ModelConfig.from_path(DEMO_MODEL), torch.bfloat16, "cpu")
    model.bind(NativeOps(kernels))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            assert isinstance(weight, Weight)
            with pytest.raises(AssertionError, match="can no longer be loaded"):
                list(weight.targets(name))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_same_bits_in_any_batch_chunk_and_page_size(
    dtype: torch.dtype, kernels: NativeKernels
) -> None:
    model = load_model(Path(DEMO_MODEL), ModelConfig.from_path(DEMO_MODEL), dtype, "cpu")
    model.bind(NativeOps(kernels))
    backend = CpuNativeAttention(kernels, deterministic=True)
    ids = torch.randint(1, 4096, (3, 100), generator=torch.Generator().manual_seed(0)).tolist()
    alone = [PagedForward(model, 16, backend=backend, dtype=dtype).step([(0, row)]) for row in ids]
    forward = PagedForward(model, 4, backend=backend, dtype=dtype)
    for start, end in ((0, 37), (37, 38), (38, 99), (99, 100)):
        work = [(row, ids[row][start:end]) for row in (2, 0, 1)]
        logits = forward.step(work).split(end - start)
        for (row, _), got in zip(work, logits, strict=True):
            assert torch.equal(got, alone[row][start:end])
