"""What the processes of a ring find in their environment."""

from __future__ import annotations

import pytest

from runtime.environment import child_environment


def test_ranks_meet_over_the_loopback_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert child_environment()["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert child_environment()["NCCL_SOCKET_IFNAME"] == "eth0"
