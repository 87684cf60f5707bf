"""Names of additional outputs: those that a launch may serve, and those that a request may ask for."""

from __future__ import annotations

import pytest

from runtime.base.errors import ConfigError, InvalidRequest
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.model_config import ModelConfig
from runtime.launcher.checks.additional_outputs import check_additional_outputs
from runtime.sampling.additional_outputs import check_asked, check_served
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.wire.sampling_params import SamplingParams
from tests.harness.cases import for_each

GOOD = "hidden_states,hidden_states:0,hidden_states:4,self_attn:3,mlp:0"


def test_names_of_a_launch_are_listed_once_each() -> None:
    config = RuntimeConfig(additional_output=" mlp:0, hidden_states,,mlp:0")
    assert config.additional_outputs == ("mlp:0", "hidden_states")
    assert RuntimeConfig().additional_outputs == ()
    check_served(GOOD.split(","), num_layers=4)


@for_each(
    "name",
    ["hidden_states:5", "hidden_states:-1", "hidden_states:01", "hidden_states:", "mlp:4", "mlp", "x:²"],
)
def test_names_that_a_model_does_not_have_are_refused_with_those_it_has(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_served(["hidden_states", name], num_layers=4)
    message = str(caught.value)
    assert repr(name) in message
    assert "hidden_states:0 to hidden_states:4, self_attn:0 to self_attn:3, mlp:0 to mlp:3" in message


def test_what_generates_nothing_or_is_not_ours_has_none() -> None:
    model = ModelConfig.from_path(DEMO_MODEL)
    check_additional_outputs(RuntimeConfig(additional_output="mlp:0"), model)
    with pytest.raises(ConfigError, match="'mlp:6'"):
        check_additional_outputs(RuntimeConfig(additional_output="mlp:6"), model)
    with pytest.raises(ConfigError, match="additional_output: an embedding model"):
        check_additional_outputs(RuntimeConfig(additional_output="mlp:0", task="embed"), model)
    theirs = CheckpointConfig.read(DEMO_MODEL)
    with pytest.raises(ConfigError, match=r"additional_output: .*transformers"):
        check_additional_outputs(RuntimeConfig(additional_output="mlp:0"), theirs)
    check_additional_outputs(RuntimeConfig(), theirs)


def test_a_request_is_told_what_the_server_has() -> None:
    check_asked(["mlp:0"], ("mlp:0", "hidden_states"))
    for names, served, words in (
        (["mlp:1"], ("mlp:0", "hidden_states"), "no 'mlp:1'; it has mlp:0, hidden_states"),
        (["mlp:1"], (), "without --additional-output"),
        (["mlp:0", "mlp:0"], ("mlp:0",), "twice"),
    ):
        with pytest.raises(InvalidRequest, match=words) as caught:
            check_asked(names, served)
        assert caught.value.param == "additional_outputs"


def test_nothing_is_gathered_of_a_prompt_without_a_name() -> None:
    SamplingParams(additional_outputs=("mlp:0",), gather_context=True).validate()
    with pytest.raises(InvalidRequest, match="gather_context"):
        SamplingParams(gather_context=True).validate()
