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
from model_worker.kernels.native.operators import PackedLinear, pack
from tests.harness.models.native import native_kernels

K = 1024


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return native_kernels()


def _normal(rows: int) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows))


def test_weights_that_move_lie_behind_each_other() -> None:
    pages = HugePages()
    first, second, large = _normal(48), _normal(33), torch.empty(CHUNK_BYTES // K // 4, K)
    copies = first.clone(), second.clone()
    for weight, rows in ((first, 48), (second, 48), (large, len(large))):
        pages.take(weight, rows)
        assert weight.untyped_storage().nbytes() == rows * K * 4
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


def test_layers_compute_from_where_their_weights_lie(kernels: NativeKernels) -> None:
    weight, row = _normal(97), _normal(1)
    expected = row.double() @ weight.double().t()
    quantized, scale = quantize_rows(weight)
    pack(kernels, weight)
    got = PackedLinear(kernels, weight, None, out_dtype=torch.float32)(row)
    assert torch.allclose(got.double(), expected, atol=1e-3)
    assert weight.untyped_storage().nbytes() == 112 * K * 4, "with the room of whole panels"
    got = Int8Linear(kernels, quantized, scale, None, torch.float32)(row)
    assert torch.allclose(got.double(), expected, atol=2)
    assert quantized.untyped_storage().nbytes() == 112 * K


def test_a_chunk_goes_back_when_its_last_weight_does() -> None:
    def chunks() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = ([int(end, 16) for end in line.split()[0].split("-")] for line in lines)
        return sum(end - begin for begin, end in spans) // CHUNK_BYTES

    before, pages, weight = chunks(), HugePages(), _normal(48)
    pages.take(weight, 48)
    del pages
    gc.collect()
    assert chunks() > before
    del weight
    gc.collect()
    assert chunks() == before
