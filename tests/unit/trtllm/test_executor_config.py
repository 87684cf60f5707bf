"""ExecutorConfig, SchedulerConfig and KvCacheConfig: the settings they stand for, and what they refuse."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import pytest

from carousel import (
    CapacitySchedulerPolicy,
    ConfigError,
    ExecutorConfig,
    KvCacheConfig,
    PeftCacheConfig,
    SchedulerConfig,
)
from carousel.trtllm.executor_config import COUNTS, UNBUILT, AdditionalModelOutput
from carousel.trtllm.executor_settings import runtime_settings
from runtime.settings.config import RuntimeConfig, from_values
from tests.harness.cases import for_each

TENSORRT_LLM = {
    "beam_batching": "drain",
    "beam_defaults": "trtllm",
    "batching_type": "inflight_fused",
    "capacity_scheduler": "guaranteed_no_evict",
    "disable_chunked_prefill": False,
    "disable_radix_cache": False,
    "gather_generation_logits": False,
    "iter_stats_max_iterations": 1000,
    "max_beam_width": 1,
    "mem_fraction_static": 0.9,
    "request_stats_max_iterations": 0,
}
"""Settings of a launch for which nothing is said."""


class TheirPolicy(Enum):
    """Stands for the enum of another library."""

    MAX_UTILIZATION = 0


class TheirCompiledPolicy:
    """Stands for a member of an enum that pybind11 made, which is of no class of Python's."""

    name = "STATIC_BATCH"


def _with(config: Any, name: str, value: object) -> Any:
    setattr(config, name, value)
    return config


def test_without_a_word_they_are_what_tensorrt_llm_does() -> None:
    assert runtime_settings({"executor_config": ExecutorConfig()}) == TENSORRT_LLM
    assert set(TENSORRT_LLM) <= set(RuntimeConfig.__struct_fields__)


@for_each(
    ("config", "settings"),
    [
        (ExecutorConfig(max_batch_size=8), {"max_running_requests": 8}),
        (ExecutorConfig(max_num_tokens=64), {"chunked_prefill_size": 64}),
        (ExecutorConfig(max_queue_size=3), {"max_queued_requests": 3}),
        (ExecutorConfig(max_beam_width=4), {"max_beam_width": 4}),
        (
            ExecutorConfig(enable_chunked_context=False),
            {"disable_chunked_prefill": True, "chunked_prefill_size": 8192},
        ),
        (ExecutorConfig(gather_generation_logits=True), {"gather_generation_logits": True}),
        (ExecutorConfig(iter_stats_max_iterations=0), {"iter_stats_max_iterations": 0}),
        (ExecutorConfig(request_stats_max_iterations=5), {"request_stats_max_iterations": 5}),
        (
            ExecutorConfig(scheduler_config=SchedulerConfig("max_utilization")),
            {"capacity_scheduler": "max_utilization"},
        ),
        (
            ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False, max_tokens=99)),
            {"disable_radix_cache": True, "max_total_tokens": 99},
        ),
        (ExecutorConfig(normalize_log_probs=False, additional_model_outputs=[]), {}),
        (
            ExecutorConfig(
                additional_model_outputs=[AdditionalModelOutput("a:1"), AdditionalModelOutput("b")]
            ),
            {"additional_output": "a:1,b"},
        ),
    ],
)
def test_fields_of_the_whole_are_settings(config: ExecutorConfig, settings: dict[str, Any]) -> None:
    found = runtime_settings({"executor_config": config})
    assert found == TENSORRT_LLM | settings
    from_values(found)


def test_static_batching_has_its_own_scheduler_unless_one_is_given() -> None:
    config = ExecutorConfig(batching_type="STATIC")
    expected = TENSORRT_LLM | {"batching_type": "static"}
    del expected["capacity_scheduler"]
    assert runtime_settings({"executor_config": config}) == expected


@for_each(
    ("config", "name"),
    [
        (SchedulerConfig(), "guaranteed_no_evict"),
        (SchedulerConfig(policy="MAX_UTILIZATION"), "max_utilization"),
        (SchedulerConfig(CapacitySchedulerPolicy.STATIC_BATCH), "static_batch"),
        (SchedulerConfig(TheirPolicy.MAX_UTILIZATION), "max_utilization"),
        (SchedulerConfig(TheirCompiledPolicy()), "static_batch"),  # type: ignore[arg-type]
        (SchedulerConfig("My.module:Class", "FIRST_COME_FIRST_SERVED"), "My.module:Class"),
    ],
)
def test_a_policy_is_a_name_or_anybodys_enum(config: SchedulerConfig, name: str) -> None:
    assert runtime_settings({"scheduler_config": config}) == {"capacity_scheduler": name}


@for_each(
    ("config", "settings"),
    [
        (KvCacheConfig(free_gpu_memory_fraction=0.5), {"mem_fraction_static": 0.5}),
        (KvCacheConfig(max_attention_window=64), {"max_attention_window": 64}),
        (KvCacheConfig(max_attention_window=[64, 64]), {"max_attention_window": 64}),
        (KvCacheConfig(sink_token_length=0, host_cache_size=0, enable_partial_reuse=False), {}),
    ],
)
def test_the_kv_cache_is_as_large_as_it_says(config: KvCacheConfig, settings: dict[str, Any]) -> None:
    default = {"disable_radix_cache": False, "mem_fraction_static": 0.9}
    assert runtime_settings({"kv_cache_config": config}) == default | settings


def test_keywords_beside_an_object_win_over_its_defaults_and_may_not_contradict_the_rest() -> None:
    config = ExecutorConfig(max_batch_size=8)
    found = runtime_settings({"executor_config": config, "gpu_memory_utilization": 0.5, "page_size": 1})
    assert found == TENSORRT_LLM | {"max_running_requests": 8, "mem_fraction_static": 0.5, "page_size": 1}
    with pytest.raises(ConfigError, match=r"executor_config.max_batch_size: contradicts max_num_seqs"):
        runtime_settings({"executor_config": config, "max_num_seqs": 9})


@for_each(
    ("given", "named"),
    [
        *(
            ({"executor_config": _with(ExecutorConfig(), name, 77)}, f"executor_config.{name}")
            for name in [
                *UNBUILT,
                "additional_model_outputs",
                "batching_type",
                "normalize_log_probs",
                "enable_chunked_context",
            ]
        ),
        *(
            ({"executor_config": _with(ExecutorConfig(), name, 0)}, f"executor_config.{name}")
            for name in COUNTS
        ),
        *(
            ({"kv_cache_config": _with(KvCacheConfig(), each.name, "x")}, f"kv_cache_config.{each.name}")
            for each in dataclasses.fields(KvCacheConfig)
        ),
        *(
            (
                {"peft_cache_config": _with(PeftCacheConfig(), each.name, "x")},
                f"peft_cache_config.{each.name}",
            )
            for each in dataclasses.fields(PeftCacheConfig)
        ),
        ({"peft_cache_config": PeftCacheConfig(num_put_workers=0)}, "num_put_workers"),
        ({"peft_cache_config": PeftCacheConfig(num_copy_streams=2)}, "num_copy_streams"),
        ({"peft_cache_config": PeftCacheConfig(optimal_adapter_size=0)}, "optimal_adapter_size"),
        ({"kv_cache_config": KvCacheConfig(max_attention_window=[8, 9])}, "layer to layer"),
        ({"kv_cache_config": KvCacheConfig(free_gpu_memory_fraction=1.5)}, "free_gpu_memory_fraction"),
        ({"kv_cache_config": KvCacheConfig(max_tokens=True)}, "max_tokens"),
        ({"scheduler_config": SchedulerConfig(dynamic_batch_config={})}, "dynamic_batch_config"),
        ({"scheduler_config": SchedulerConfig("EVERYTHING")}, "capacity_scheduler_policy: MAX_UTILIZATION"),
        ({"scheduler_config": SchedulerConfig(policy="x")}, "scheduler_config.policy"),
        (
            {"scheduler_config": SchedulerConfig("STATIC_BATCH", policy="MAX_UTILIZATION")},
            "policy: contradicts",
        ),
        (
            {"scheduler_config": SchedulerConfig(context_chunking_policy="EQUAL_PROGRESS")},
            "context_chunking_policy",
        ),
        ({"scheduler_config": KvCacheConfig()}, "scheduler_config: a carousel.SchedulerConfig"),
        (
            {"scheduler_config": SchedulerConfig(), "executor_config": ExecutorConfig()},
            "scheduler_config: give it as a field",
        ),
        ({"kv_cache_config": KvCacheConfig(), "preset": "trtllm"}, "preset"),
    ],
)
def test_what_is_not_built_or_wrong_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        runtime_settings(given)


def test_an_unknown_field_is_a_type_error() -> None:
    for kind in (ExecutorConfig, SchedulerConfig, KvCacheConfig):
        with pytest.raises(TypeError, match="no_such_field"):
            kind(no_such_field=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("keyword", ["engine_dir", "tokenizer_dir"])
def test_an_empty_folder_is_a_variable_that_is_not_set(keyword: str) -> None:
    with pytest.raises(ConfigError, match=f"^{keyword}: the value is empty"):
        runtime_settings({keyword: ""})


def test_a_cache_of_adapters_is_settings_and_serves_adapters() -> None:
    given = PeftCacheConfig(
        num_device_module_layer=100,
        host_cache_size=5,
        device_cache_percent=0.5,
        num_put_workers=3,
        num_ensure_workers=2,
    )
    for arguments in (
        {"peft_cache_config": given},
        {"executor_config": ExecutorConfig(peft_cache_config=given)},
    ):
        settings = runtime_settings(arguments)
        wanted = {
            "enable_lora": True,
            "lora_device_rows": 100,
            "lora_host_cache_size": 5,
            "lora_device_percent": 0.5,
            "lora_load_workers": 2,
            "tokenizer_workers": 3,
            "lora_page_rank": 8,
            "max_lora_rank": 64,
        }
        assert {name: settings[name] for name in wanted} == wanted
    assert "enable_lora" not in runtime_settings({"executor_config": ExecutorConfig()})
