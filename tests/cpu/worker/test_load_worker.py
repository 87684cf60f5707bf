"""Reports of a worker while it loads: how far it is, and which parts of the CPU it cannot use."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
import torch

from model_worker import load_worker
from model_worker.device import make_device
from runtime.base import progress
from runtime.settings.config import RuntimeConfig
from tests.harness.models.plans import save_tiny_llama

DType: TypeAlias = Literal["float32", "bfloat16"]
NUM_TENSORS = 21  # embedding, head, final norm, and nine of each of two layers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


def load(
    checkpoint: Path,
    dtype: DType = "float32",
    backend: str = "torch_native",
    max_total_tokens: int = 256,
    *,
    disable_cuda_graph: bool = False,
) -> int:
    """Load the worker; how often it showed that it lives."""
    config = RuntimeConfig(
        model=str(checkpoint),
        dtype=dtype,
        device="cpu",
        attention_backend=backend,
        context_length=64,
        max_running_requests=2,
        max_total_tokens=max_total_tokens,
        disable_cuda_graph=disable_cuda_graph,
    )
    beats = []
    load_worker.load_worker(config, make_device("cpu", threaded=False), lambda: beats.append(1)).close()
    return len(beats)


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [message for message in caplog.messages if word in message]


def test_loading_says_how_many_tensors_are_there_and_beats_after_each(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with caplog.at_level(logging.INFO):
        assert load(checkpoint) == NUM_TENSORS + 1
    first, *said = lines(caplog, "loading weights")
    assert first == f"loading weights: 0.2 MiB in 1 file from {checkpoint}"
    assert said == [
        f"loading weights: {n} of {NUM_TENSORS} tensors ({100 * n // NUM_TENSORS} %)"
        for n in range(1, NUM_TENSORS + 1)
    ]


@pytest.mark.parametrize(("max_total_tokens", "said"), [(50, 0), (40, 1)])
def test_a_cache_with_no_room_for_the_longest_sequence_says_so(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, max_total_tokens: int, said: int
) -> None:
    """40 tokens are 3 pages of 16; 50 are 4, which is the context length."""
    with caplog.at_level(logging.INFO):
        load(checkpoint, max_total_tokens=max_total_tokens)
    assert len(lines(caplog, "the longest sequence is 48 tokens, not 64")) == said
    assert len(lines(caplog, "--max-total-tokens changes it")) == 1


def test_loading_says_so_once_an_interval_at_most(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: 0.625 * next(ticks))
    with caplog.at_level(logging.INFO):
        loading = load_worker.LoadProgress(lambda: None)
        for n in range(1, 25):
            loading.note(n, 100)
    assert [line.split()[2] for line in lines(caplog, "loading weights")] == ["8", "16", "24"]


def test_loading_tells_the_share_that_is_there() -> None:
    shares: list[float] = []
    loading = load_worker.LoadProgress(lambda: None, shares.append)
    for n in range(1, 5):
        loading.note(n, 4)
    assert shares == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("is_disabled", [False, True])
def test_a_worker_records_nothing_where_the_settings_say_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_disabled: bool
) -> None:
    recorded: list[object] = []
    monkeypatch.setattr(
        "model_worker.runner.model_runner.record_steps", lambda *parts: recorded.append(parts)
    )
    load(checkpoint, disable_cuda_graph=is_disabled)
    assert bool(recorded) is not is_disabled


def test_a_launch_prints_at_debug_which_kernel_each_operation_has(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "model_worker"):
        load(checkpoint)
    (table,) = lines(caplog, "kernels:\n")
    chosen = {tuple(line.split()[:2]) for line in table.splitlines()[1:]}
    assert {
        *(("attention", "TorchNativeAttention"), ("linear", "torch"), ("rms_norm", "torch")),
        *(("sampling", "TorchSampling"), ("step", "Python")),
    } <= chosen
