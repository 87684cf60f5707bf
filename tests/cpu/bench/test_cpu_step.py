"""The benchmark of CPU steps tells the time in kernels from the rest."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import bench_cpu_step
from model_worker.attention.cpu_native import CpuNativeAttention


def test_time_in_kernels_does_not_count_as_outside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = CpuNativeAttention(dtype=torch.float32).kernels
    for name in bench_cpu_step.KERNELS:
        monkeypatch.setattr(kernels, name, getattr(kernels, name))  # given back at the end
    clock = bench_cpu_step.KernelClock()
    monkeypatch.setattr(bench_cpu_step, "CLOCK", clock)
    flags = "--models demo --backends cpu_native,cpu_native+int8 --batches 1 --contexts 16 --seconds 0.05"
    monkeypatch.setattr(sys, "argv", ["bench_cpu_step", *flags.split(), "--dtype", "float32"])
    bench_cpu_step.main()
    case = json.loads(capsys.readouterr().out.splitlines()[-1])["demo"]["b1_c16"]
    assert clock.seconds > 0
    # CPU time of one thread is never more than wall time, of which a thread's kernels have their part once.
    assert 0 < case["outside_kernels_us"][1] < case["cpu_native"][0] * 1e3
