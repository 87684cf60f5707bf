"""The int8 linear layer: C++ against torch and exact integers; no row depends on the others or on threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_worker.kernels.embedding import embed_int8
from model_worker.kernels.int8_linear import int8_linear, quantize_rows
from model_worker.kernels.native.int8_linear import OFFSET, Int8Linear, can_pack_int8
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import NATIVE_ACTIVATIONS, Activate, NativeTakeRows, pack_panels
from tests.harness.models.native import NATIVE_ISAS, native_kernels, needs_compiler

pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One rounding to the output's dtype, and the scales' product and the bias in float32.
RTOL = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(params=NATIVE_ISAS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return native_kernels(request.param)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _linear(
    kernels: NativeKernels, n: int, k: int, dtype: torch.dtype, *, with_bias: bool, num_threads: int = 1
) -> tuple[Int8Linear, Tensor, Tensor, Tensor | None]:
    """The operator, and its weight as it was, scale and bias."""
    weight, scale = quantize_rows(_normal(n, k))
    bias = _normal(n, dtype=dtype, seed=1) if with_bias else None
    with _threads(num_threads):
        return Int8Linear(kernels, weight.clone(), scale, bias, dtype), weight, scale, bias


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(16, 16), (48, 80), (80, 256), (1040, 144), (97, 64), (1, 2064)])
def test_products_are_the_exact_integers_times_the_scales(
    kernels: NativeKernels, n: int, k: int, dtype: torch.dtype, with_bias: bool, num_threads: int
) -> None:
    linear, weight, scale, bias = _linear(kernels, n, k, dtype, with_bias=with_bias, num_threads=num_threads)
    rows = _normal(211, k, dtype=dtype, seed=2)
    quantized, x_scale = linear.quantize(rows)
    sums = F.linear(quantized.double() - OFFSET, weight.double())
    expected = sums * x_scale.double().unsqueeze(1) * scale.double()
    size = expected.abs()
    if bias is not None:
        expected += bias.double()
        size += bias.double().abs()
    together = linear(rows)
    assert together.dtype is dtype
    assert ((together.double() - expected).abs() <= RTOL[dtype] * size + 1e-30).all()
    for num_rows in (0, 1, 2, 5, 6, 7, 11, 12, 13, 25, 97):
        assert torch.equal(linear(rows[:num_rows]), together[:num_rows])
        assert torch.equal(linear(rows[100 : 100 + num_rows]), together[100 : 100 + num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_keeps_the_float32_of_its_sums(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight, scale = quantize_rows(_normal(97, 64))
    head = Int8Linear(kernels, weight.clone(), scale, None, dtype, out_dtype=torch.float32)
    rows = _normal(5, 64, dtype=dtype, seed=2)
    quantized, x_scale = head.quantize(rows)
    sums = F.linear(quantized.double() - OFFSET, weight.double())
    expected = (sums * x_scale.double().unsqueeze(1) * scale.double()).float()
    torch.testing.assert_close(head(rows), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("width", "k"), [(16, 32), (80, 96), (1040, 144), (80, 4128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_beside_its_product_gives_the_bits_of_the_two_operators(
    kernels: NativeKernels, dtype: torch.dtype, width: int, k: int, with_bias: bool
) -> None:
    linear, *_ = _linear(kernels, 2 * width, k, dtype, with_bias=with_bias)
    rows = _normal(97, k, dtype=dtype, seed=2)
    for activation in NATIVE_ACTIVATIONS:
        gated = linear.gated(activation)
        assert gated is not None
        expected = Activate(kernels, activation, has_up=True)(linear(rows))
        for num_rows in (0, 1, 3, 5, 6, 7, 16, 50, 97):
            assert torch.equal(gated(rows[:num_rows]), expected[:num_rows])


def test_a_gate_takes_halves_of_whole_panels_and_a_result_of_the_rows_dtype(kernels: NativeKernels) -> None:
    for n, out_dtype in ((48, torch.bfloat16), (64, torch.float32)):
        weight, scale = quantize_rows(_normal(n, 32))
        linear = Int8Linear(kernels, weight, scale, None, torch.bfloat16, out_dtype=out_dtype)
        assert linear.gated("silu") is None


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_in_int8_are_the_rows_times_their_scales(
    kernels: NativeKernels, dtype: torch.dtype, is_packed: bool
) -> None:
    weight, scale = quantize_rows(_normal(97, 52))
    ids = torch.tensor([96, 0, 41, 41, 15, 16])
    expected = embed_int8(ids, weight, scale, dtype=dtype)
    assert torch.equal(expected, (weight[ids].double() * scale[ids].double().unsqueeze(1)).to(dtype))
    if is_packed:
        pack_panels(kernels, weight)
    got = NativeTakeRows(kernels)(weight, ids, packed=is_packed, row_scale=scale, dtype=dtype)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("lowest", [-127, -128])
def test_the_largest_products_do_not_overflow(kernels: NativeKernels, lowest: int) -> None:
    """127 * 127 and -127 * 127 everywhere, where instructions that saturate at 16 bits would be wrong; and
    -128, which a checkpoint of int8 may have and which has no opposite. For each way in which rows pass.
    """
    k = 4096
    weight = torch.full((48, k), 127, dtype=torch.int8)
    weight[1::3] = -127
    weight[2::3] = lowest
    of_weights = weight[:, :1].T.float()
    linear = Int8Linear(kernels, weight, torch.ones(48), None, torch.float32)
    for num_rows in (1, 2, 3, 4, 5, 6, 13):
        for first in (127.0, -127.0):
            x = torch.full((num_rows, k), first)
            x[1::2] = -first
            assert torch.equal(linear(x), x[:, :1] * k * of_weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_quantised_as_by_torch(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """But for values in the middle of two steps, where the product is rounded once or twice."""
    linear, *_ = _linear(kernels, 16, 400, dtype, with_bias=False)
    powers = 3 if dtype is torch.float16 else 20
    x = _normal(301, 400, dtype=dtype) * torch.logspace(-powers, powers, 301).unsqueeze(1)
    x = x.to(dtype)
    x[7] = 0.0
    got, scale = linear.quantize(x)
    expected, expected_scale = quantize_rows(x)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    got = got.int() - OFFSET
    apart = (got - expected.int()).abs()
    assert apart.max() <= 1
    assert (apart != 0).float().mean() < 5e-3
    assert got.abs().max() == 127
    assert not got[7].any()
    assert not linear(x)[7].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layer_equals_the_torch_version(kernels: NativeKernels, dtype: torch.dtype) -> None:
    linear, weight, scale, bias = _linear(kernels, 96, 320, dtype, with_bias=True)
    x = _normal(40, 320, dtype=dtype, seed=5)
    expected = int8_linear(x, weight, scale, bias)
    error = (linear(x).double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-4 if dtype is torch.float32 else 2.0**-8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_shows_it_and_leaves_others_alone(
    kernels: NativeKernels, value: float
) -> None:
    linear, *_ = _linear(kernels, 16, 64, torch.float32, with_bias=False)
    x = _normal(3, 64)
    clean = linear(x)
    x[1, 5] = value
    got = linear(x)
    assert not got[1].isfinite().any()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_other_shapes_and_dtypes_have_no_kernel() -> None:
    def weight(n: int, k: int) -> Tensor:
        return torch.zeros(n, k, dtype=torch.int8)

    assert can_pack_int8(weight(32, 48), torch.bfloat16)
    assert can_pack_int8(weight(32, 48), torch.float16)
    assert not can_pack_int8(weight(32, 48), torch.float64)
    assert can_pack_int8(weight(40, 48), torch.bfloat16)
    assert not can_pack_int8(weight(32, 40), torch.bfloat16)
