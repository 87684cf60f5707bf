"""What a GPU must be, and have, to be used: refused by name before anything loads; torch.cuda is faked."""

from __future__ import annotations

import pytest
import torch

from model_worker.device import make_device
from model_worker.device.cpu import CpuDevice
from model_worker.device_memory import make_kv_pool
from model_worker.kv_pool import KVLayout
from runtime.errors import ConfigError


def test_a_card_before_ampere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(ConfigError, match=r"device: Tesla T4 has compute capability 7\.5.*8\.0"):
        make_device("cuda", threaded=True)


def test_no_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device: cuda was asked for"):
        make_device("cuda", threaded=True)


def test_no_memory_for_the_pool_names_what_to_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("model_worker.device_memory.MHATokenToKVPool", refuse)
    with pytest.raises(ConfigError, match=r"KV cache of 3\.00 GiB: lower --mem-fraction-static"):
        make_kv_pool((1 << 14) - 1, 64, KVLayout(2, 6, 64), torch.bfloat16, CpuDevice(threaded=False))
