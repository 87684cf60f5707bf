"""Which decode steps are recorded: the settings' sizes, and the ones that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.resolved_config import resolve_config
from runtime.settings.config import RuntimeConfig
from runtime.settings.graph_sizes import graph_sizes
from tests.harness.cases import for_each


def test_small_sizes_one_by_one_and_then_every_eighth_up_to_the_rows() -> None:
    assert graph_sizes(RuntimeConfig(max_running_requests=20)) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(RuntimeConfig(max_running_requests=1)) == (1,)
    assert graph_sizes(RuntimeConfig(max_running_requests=2)) == (1, 2)
    every = graph_sizes(RuntimeConfig(max_running_requests=1024))
    assert every[-1] == 256
    assert len(every) == 35


def test_the_largest_or_all_of_them_may_be_named() -> None:
    assert graph_sizes(RuntimeConfig(cuda_graph_max_bs=10)) == (1, 2, 4, 8, 10)
    assert graph_sizes(RuntimeConfig(cuda_graph_bs="8,1,3", max_running_requests=4)) == (1, 3)
    assert graph_sizes(RuntimeConfig(cuda_graph_bs="64", max_running_requests=4)) == (4,)
    assert graph_sizes(RuntimeConfig(disable_cuda_graph=True)) == ()


@for_each(
    ("settings", "message"),
    [
        ({"cuda_graph_bs": "1,b"}, "cuda_graph_bs: '1,b' is no list"),
        ({"cuda_graph_bs": "0,2"}, "cuda_graph_bs: 0 is no batch size"),
        ({"cuda_graph_bs": "2", "cuda_graph_max_bs": 4}, "cuda_graph_max_bs: cuda_graph_bs names every size"),
        ({"cuda_graph_bs": "2", "disable_cuda_graph": True}, "cuda_graph_bs: with disable_cuda_graph"),
        ({"cuda_graph_max_bs": 2, "device": "cpu"}, "cuda_graph_max_bs: the device is a CPU"),
        ({"cuda_graph_bs": "2", "task": "embed"}, "cuda_graph_bs: steps of an embedding model"),
    ],
)
def test_settings_that_record_nothing_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = RuntimeConfig(**{"device": "cuda", **settings})
    with pytest.raises(ConfigError, match=message):
        resolve_config(config, context_length=64, dtype="bfloat16", model_path=tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "cpu"}, ""),
        ({"device": "cpu", "tp_size": 2}, "steps of several ranks on a CPU"),
        ({"device": "cpu", "task": "embed"}, "steps of an embedding model"),
        ({"device": "cuda"}, ""),
    ],
)
def test_where_nothing_is_recorded_a_line_says_that_nothing_changes(
    settings: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = RuntimeConfig(disable_cuda_graph=True, **settings)
    resolve_config(config, context_length=64, dtype="bfloat16", model_path=tmp_path)
    about_recording = [text for text in caplog.messages if not text.startswith("CPU kernels use")]
    assert [said in text for text in about_recording] == [True] * bool(said)
