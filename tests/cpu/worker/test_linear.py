"""Linear layers by torch, where it has no product of the dtype for this CPU, and where it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_worker.kernels import linear as module
from model_worker.kernels.linear import MIN_WIDE_ROWS, linear
from runtime.base.cpu_isa import cpu_isa, machine_isa

NUM_INPUTS = 48


def _normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """Dtype and number of outputs of torch's products; a CPU that has them in float32 only."""
    made: list[tuple[torch.dtype, int]] = []
    product = torch.nn.functional.linear

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made.append((x.dtype, len(weight)))
        return product(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    monkeypatch.setattr(module, "_has_product", lambda dtype: dtype is torch.float32)
    monkeypatch.setattr(module, "WIDE_ELEMENTS", 20 * NUM_INPUTS)
    return made


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_are_multiplied_in_float32_a_part_of_the_weight_at_a_time(
    products: list[tuple[torch.dtype, int]], dtype: torch.dtype, with_bias: bool
) -> None:
    weight = _normal(50, NUM_INPUTS, dtype=dtype, seed=1)
    bias = _normal(50, dtype=dtype, seed=2) if with_bias else None
    x = _normal(MIN_WIDE_ROWS, NUM_INPUTS, dtype=dtype, seed=3)
    got = linear(x, weight, bias)
    assert products == [(torch.float32, 20), (torch.float32, 20), (torch.float32, 10)]
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert got.dtype is dtype
    torch.testing.assert_close(got, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(MIN_WIDE_ROWS - 1, torch.bfloat16), (MIN_WIDE_ROWS, torch.float32)]
)
def test_few_rows_and_what_torch_has_a_product_for_are_one_product(
    products: list[tuple[torch.dtype, int]], rows: int, dtype: torch.dtype
) -> None:
    weight = _normal(50, NUM_INPUTS, dtype=dtype, seed=1)
    got = linear(_normal(rows, NUM_INPUTS, dtype=dtype, seed=3), weight)
    assert (got.dtype, got.shape) == (dtype, (rows, 50))
    assert products == [(dtype, 50)]


def test_torch_is_asked_which_products_it_has() -> None:
    assert module._has_product(torch.float32)
    if cpu_isa() not in ("portable", "avx2"):
        assert module._has_product(torch.bfloat16)
    elif cpu_isa() != machine_isa():
        assert not module._has_product(torch.bfloat16)
