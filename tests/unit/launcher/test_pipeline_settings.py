"""Settings that a pipeline of stages refuses, and what follows from the number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.hosts.host import places
from runtime.launcher.resolved_config import resolve_config
from runtime.settings.config import RuntimeConfig
from tests.harness.cases import for_each

PLACES: dict[str, Any] = {
    "context_length": 512,
    "dtype": "float32",
    "has_head": True,
    "model_path": Path("/models/some"),
}


@for_each(
    ("settings", "has_spec", "says"),
    [
        ({"pp_layers": "3,3"}, True, "pp_layers: there is one stage"),
        ({"pp_size": 2}, False, "pp_size: 2 stages, but model_impl"),
        ({"pp_size": 2, "speculative_algorithm": "NGRAM"}, True, "pp_size: .*speculative_algorithm"),
        ({"pp_size": 2, "enable_lora": True}, True, "pp_size: .*enable_lora"),
        ({"pp_size": 2, "additional_output": "hidden_states"}, True, "pp_size: .*additional_output"),
        ({"pp_size": 2, "logits_processor": "own=some.module:Class"}, True, "pp_size: .*logits_processor"),
        ({"pp_size": 2, "max_beam_width": 4}, True, "pp_size: .*max_beam_width"),
        ({"pp_size": 2, "task": "embed"}, True, "pp_size: .*task"),
    ],
)
def test_what_stages_do_not_do_is_refused_by_name(
    settings: dict[str, Any], has_spec: bool, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_config(RuntimeConfig(device="cpu", **settings), **PLACES, has_spec=has_spec)


def test_each_rank_of_each_stage_is_a_process_with_its_share_of_the_cores() -> None:
    config = resolve_config(RuntimeConfig(device="cpu", pp_size=4, tp_size=2), **PLACES, has_spec=True)
    assert [place.index for place in places(config) if place.role == "worker"] == list(range(8))
    assert config.cpu_threads >= 1
    assert config.max_steps_in_flight == 5
    assert RuntimeConfig(pp_size=4, disable_overlap_schedule=True).max_steps_in_flight == 4
    assert RuntimeConfig().max_steps_in_flight == 2
