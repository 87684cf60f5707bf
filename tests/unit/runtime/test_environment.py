"""Environment of the processes of a ring."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.base.environment import allow_fp_fusion, child_environment, kernel_cache_dir


def test_ranks_meet_over_the_loopback_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert child_environment()["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert child_environment()["NCCL_SOCKET_IFNAME"] == "eth0"


def test_a_user_without_a_home_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one of `docker run --user 12345`, with HOME unset."""

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert kernel_cache_dir() == Path("/home/somebody/.cache/carousel")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert kernel_cache_dir() == Path(f"/tmp/carousel-cache-{os.getuid()}")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert kernel_cache_dir() == Path("/var/cache/carousel")


def test_products_and_sums_are_fused_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    allow_fp_fusion()
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "0"
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    allow_fp_fusion()
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"
