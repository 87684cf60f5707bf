"""Lines in which a launch on a CPU tells of slow paths: measured, remembered, naming what is faster."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path

import pytest
import torch

from model_worker.device.cpu import give_back_freed_memory
from model_worker.kernels.native import build
from model_worker.ops import linear_cost
from model_worker.ops.base import LinearWeight, Ops
from model_worker.ops.linear_cost import LinearCost, LinearCosts, linear_costs, measure_linear_costs
from model_worker.ops.native_ops import NativeOps
from model_worker.ops.selection import make_ops
from model_worker.ops.torch_ops import TorchOps
from tests.harness.models.native import native_kernels, needs_compiler

FAST, SLOW = LinearCost(100.0, 1000.0), LinearCost(1240.0, 1500.0)


def costs(own: LinearCost, in_float32: LinearCost) -> LinearCosts:
    return LinearCosts(own, in_float32, by_torch=SLOW, read_us=100.0)


def test_a_dtype_slower_than_float32_is_named_with_how_much_and_what_it_takes() -> None:
    assert costs(SLOW, FAST).slower_than_float32(torch.bfloat16) == (
        "linear layers in bfloat16 take 12 times as long for one token and 1.5 times for 64 as with --dtype "
        "float32, which takes twice the memory (measured on this CPU)"
    )
    assert not costs(FAST, SLOW).slower_than_float32(torch.bfloat16)
    assert not costs(LinearCost(109.0, 900.0), FAST).slower_than_float32(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_path_is_measured_and_threads_stay_as_they_were(dtype: torch.dtype) -> None:
    num_threads = torch.get_num_threads()
    measured = measure_linear_costs(TorchOps(), dtype)
    assert torch.get_num_threads() == num_threads
    assert measured.own is measured.by_torch
    assert (measured.own is measured.in_float32) == (dtype is torch.float32)
    for cost in (measured.own, measured.in_float32):
        assert 0 < cost.one < 1e6
        assert 0 < cost.many < 1e6
    assert measured.read_us > 0


@needs_compiler
def test_kernels_are_measured_beside_torch() -> None:
    measured = measure_linear_costs(NativeOps(native_kernels()), torch.float32)
    assert measured.own is not measured.by_torch


def test_what_was_measured_is_remembered_for_the_same_path_and_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([costs(FAST, FAST), costs(SLOW, FAST), costs(FAST, SLOW)])
    monkeypatch.setattr(linear_cost, "measure_linear_costs", lambda *_: next(answers))
    first = linear_costs(TorchOps(), torch.bfloat16, tmp_path, "")
    assert linear_costs(TorchOps(), torch.bfloat16, tmp_path, "") == first
    assert linear_costs(TorchOps(), torch.bfloat16, tmp_path, "kernels-1").own == SLOW
    monkeypatch.setattr(linear_cost, "cpu_description", lambda: ["another CPU"])
    assert linear_costs(TorchOps(), torch.bfloat16, tmp_path, "").in_float32 == SLOW


@pytest.mark.parametrize("content", [b"", b"{}", b"nonsense"])
def test_a_cache_that_cannot_be_used_does_not_stop_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(linear_cost, "measure_linear_costs", lambda *_: costs(FAST, FAST))
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    assert linear_costs(TorchOps(), torch.bfloat16, in_the_way / "cache", "").own == FAST
    linear_costs(TorchOps(), torch.bfloat16, tmp_path, "")
    (kept,) = tmp_path.glob("linear-*.json")
    kept.write_bytes(content)
    assert linear_costs(TorchOps(), torch.bfloat16, tmp_path, "").own == FAST
    assert kept.read_bytes() != content, "what cannot be read is written again"


def test_without_a_compiler_a_launch_says_what_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ())
    monkeypatch.setattr("model_worker.attention.cpu_native.kernel_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(linear_cost, "measure_linear_costs", lambda *_: costs(SLOW, FAST))
    monkeypatch.setattr("model_worker.ops.selection.kernel_cache_dir", lambda: tmp_path)
    ops = make_ops("auto", device="cpu", dtype=torch.bfloat16, head_dim=48)
    ops.table.log()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "there is no C++ compiler" in warned[0]
    assert warned[1] == (
        "by torch, linear layers take 12 times as long for one token as reading their weights, which is "
        "about what the C++ kernels take (measured on this CPU)"
    )
    assert warned[2].startswith("linear layers in bfloat16 take 12 times as long")


@needs_compiler
def test_what_has_no_kernel_is_named_with_what_torch_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(linear_cost, "measure_linear_costs", lambda *_: costs(FAST, FAST))
    monkeypatch.setattr("model_worker.ops.selection.kernel_cache_dir", lambda: tmp_path)
    ops = make_ops("auto", device="cpu", dtype=torch.float32, head_dim=64)
    ops.head(LinearWeight(torch.zeros(96, 64, dtype=torch.float64), torch.float64))
    caplog.clear()
    ops.table.log()
    (line,) = caplog.messages
    assert line.startswith("computed more slowly than it could be: head by torch (")
    assert line.endswith(
        "; by torch, linear layers take 12 times as long for one token and 1.5 times for 64 (measured on "
        "this CPU)"
    )


@needs_compiler
def test_weights_that_were_measured_leave_no_memory_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resident_bytes() -> int:
        gc.collect()
        give_back_freed_memory()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def make() -> Ops:
        return make_ops("auto", device="cpu", dtype=torch.bfloat16, head_dim=64)

    remembered = tmp_path / "remembered"
    monkeypatch.setattr("model_worker.ops.selection.kernel_cache_dir", lambda: remembered)
    make()
    first = make()  # measures nothing
    before = resident_bytes()
    monkeypatch.setattr("model_worker.ops.selection.kernel_cache_dir", lambda: tmp_path / "new")
    second = make()
    num_bytes = linear_cost.NUM_WEIGHTS * linear_cost.SHAPE[0] * linear_cost.SHAPE[1] * 4
    assert resident_bytes() - before < num_bytes / 2
    assert second is not first, "both are still there"
