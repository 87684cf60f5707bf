"""Weights lie behind each other in memory of huge pages, each in a storage of its own."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_worker.kernels.int8_linear import quantize_rows
from model_worker.kernels.native.huge_pages import CHUNK_BYTES, LEAST_BYTES, PAGE_BYTES, HugePages
from model_worker.kernels.native.int8_linear import Int8Linear
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import PackedLinear, pack, round_up
from tests.harness.models.native import NATIVE_ISAS, native_kernels

K = 1024


@pytest.fixture(params=NATIVE_ISAS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return native_kernels(request.param)


def _normal(rows: int) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows))


def test_weights_that_move_lie_behind_each_other() -> None:
    pages = HugePages()
    first, second, large = _normal(48), _normal(33), torch.empty(CHUNK_BYTES // K // 4, K)
    copies = first.clone(), second.clone()
    for weight, rows in ((first, 48), (second, 48), (large, len(large))):
        pages.take(weight, rows)
        assert weight.untyped_storage().nbytes() == rows * K * 4
        assert pages.has(weight)
    assert torch.equal(first, copies[0])
    assert torch.equal(second, copies[1])
    assert first.data_ptr() % PAGE_BYTES == 0
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert large.data_ptr() % PAGE_BYTES == 0, "what fills half a chunk has one of its own"


def test_a_small_weight_and_a_part_of_a_tensor_stay(kernels: NativeKernels) -> None:
    """The memory of the whole, as of all experts, would stay beside what moves."""
    whole = _normal(LEAST_BYTES // K // 4)
    parts = torch.stack([whole, whole])
    small = whole[:, : K // 2].clone(memory_format=torch.contiguous_format)
    for weight in (parts[0], small):
        before = weight.data_ptr()
        pack(kernels, weight)
        assert weight.data_ptr() == before
    before = whole.data_ptr()
    pack(kernels, whole)
    assert whole.data_ptr() != before
    assert torch.equal(whole, parts[0]), "packed alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_one_row_gives_the_bits_that_it_has_beside_others(
    kernels: NativeKernels, kind: str, dtype: torch.dtype
) -> None:
    """Alone it is computed from a stream of the weight's memory, with others another way."""
    rows = _normal(3).to(dtype)
    for n in (97, 160):
        weight = _normal(n).to(dtype)
        expected = rows.double() @ weight.double().t()
        layer: PackedLinear | Int8Linear
        if kind == "plain":
            pack(kernels, weight)
            layer = PackedLinear(kernels, weight, None, out_dtype=dtype)
        else:
            weight, scale = quantize_rows(weight)
            layer = Int8Linear(kernels, weight, scale, None, dtype)
        assert kernels.weights.has(weight)
        assert weight.untyped_storage().nbytes() == round_up(n) * K * weight.element_size()
        got = layer(rows)
        assert torch.allclose(got.double(), expected, rtol=0.01, atol=0.01 if kind == "plain" else 3)
        assert torch.equal(layer(rows[:1]), got[:1])
        gated = layer.gated("silu")
        assert (gated is None) == (n == 97)
        if gated is not None:
            assert torch.equal(gated(rows[:1]), gated(rows)[:1])


def test_without_huge_pages_weights_stay(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]")
    weight = _normal(48)
    before = weight.data_ptr()
    for pages in (HugePages(setting), HugePages(tmp_path / "of another system")):
        pages.take(weight, 48)
        assert weight.data_ptr() == before
        assert not pages.has(weight)


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def test_a_chunk_goes_back_when_its_last_weight_does() -> None:
    pages, weight = HugePages(), _normal(48)
    pages.take(weight, 48)
    address = weight.data_ptr()
    del pages
    gc.collect()
    assert is_mapped(address)
    del weight
    gc.collect()
    assert not is_mapped(address)


def test_who_starts_over_keeps_no_chunk_of_what_is_gone() -> None:
    """Weights that are measured go before those of a model come."""
    pages, measured, weight = HugePages(), _normal(48), _normal(33)
    pages.take(measured, 48)
    address = measured.data_ptr()
    pages.start_over()
    assert is_mapped(address)
    pages.take(weight, 48)
    del measured
    gc.collect()
    assert not is_mapped(address)
    assert pages.has(weight)
