"""Environment of the processes of a ring."""

from __future__ import annotations

import os

import pytest

from runtime.base.environment import allow_fp_fusion, child_environment


def test_ranks_meet_over_the_loopback_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert child_environment()["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert child_environment()["NCCL_SOCKET_IFNAME"] == "eth0"


def test_products_and_sums_are_fused_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    allow_fp_fusion()
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "0"
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    allow_fp_fusion()
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"
