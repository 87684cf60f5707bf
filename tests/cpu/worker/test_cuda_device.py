"""Requirements of a GPU: refused by name before anything loads; torch.cuda is faked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_worker.device import make_device
from model_worker.device.cpu import CpuDevice
from model_worker.memory.kv_pool import KVLayout
from model_worker.runner.device_memory import make_kv_pool
from runtime.base.errors import ConfigError
from tests.harness.pretended_gpu import pretended_gpu


def test_a_card_before_ampere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(ConfigError, match=r"device: Tesla T4 has compute capability 7\.5.*8\.0"):
        make_device("cuda", threaded=True)


@pytest.mark.parametrize(
    ("program", "named", "says"),
    [
        (
            None,
            None,
            r"C compiler.* neither gcc nor clang; install gcc \(apt install gcc\), or name one in CC",
        ),
        ("gcc", "tcc", "C compiler.* CC=tcc is no program"),
        ("gcc", None, None),
        ("clang", None, None),
        ("tcc", "tcc", None),
    ],
)
def test_no_compiler_for_triton_is_refused(
    program: str | None,
    named: str | None,
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if program is not None:
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", named or "")
    if named is None:
        monkeypatch.delenv("CC")
    with pretended_gpu():
        if says is None:
            make_device("cuda", threaded=False).close()
        else:
            with pytest.raises(ConfigError, match=rf"^device: cuda needs a {says}"):
                make_device("cuda", threaded=False)


def test_no_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device: cuda was asked for"):
        make_device("cuda", threaded=True)


def test_no_memory_for_the_pool_names_what_to_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("model_worker.runner.device_memory.MHATokenToKVPool", refuse)
    with pytest.raises(ConfigError, match=r"KV cache of 3\.00 GiB: lower --mem-fraction-static"):
        make_kv_pool((1 << 14) - 1, 64, KVLayout(2, 6, 64), torch.bfloat16, CpuDevice(threaded=False))
