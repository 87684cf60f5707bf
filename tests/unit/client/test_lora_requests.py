"""LoRARequest: what a caller may write, and what becomes of it on the wire."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from carousel import GenerationRequest, InvalidRequest, LoraConfig, LoRARequest
from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.submission import RequestOptions, Submission, options_per_prompt
from runtime.wire.handle import make_handle
from runtime.wire.plan import AdapterRef
from tests.harness.cases import for_each

HANDLE = make_handle(1, 2)


def wire(request: Any) -> AdapterRef | None:
    return build_request(HANDLE, Submission("x", options={"lora_request": request})).adapter


def test_a_request_names_its_adapter() -> None:
    assert wire(LoRARequest("sql", 3, "/adapters/sql")) == AdapterRef("sql", 3, "", "/adapters/sql")
    assert wire(LoRARequest("sql", 3)) == AdapterRef("sql", 3, "", "")
    assert wire(None) is None
    assert build_request(HANDLE, Submission("x")).adapter is None


def test_its_parts_have_the_names_of_vllm_and_tensorrt_llm_too() -> None:
    request = LoRARequest("sql", 3, "/adapters/sql")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/adapters/sql")


def test_a_path_is_that_of_the_caller() -> None:
    ref = wire(LoRARequest("sql", 3, "here"))
    assert ref is not None
    assert ref.path == os.path.abspath("here")
    assert wire(LoRARequest("sql", 3, Path("/there"))) == AdapterRef("sql", 3, "", "/there")  # type: ignore[arg-type]


@for_each(
    ("request_", "field"),
    [
        ("sql", "must be a LoRARequest"),
        (LoRARequest("", 1), "lora_name"),
        (LoRARequest("a/b", 1), "lora_name"),
        (LoRARequest("x" * 300, 1), "lora_name"),
        (LoRARequest("x", 0), "lora_int_id"),
        (LoRARequest("x", True), "lora_int_id"),
        (LoRARequest("x", 1 << 32), "lora_int_id"),
        (LoRARequest("x", "1"), "lora_int_id"),  # type: ignore[arg-type]
        (LoRARequest("x", 1, "/" + "y" * 5000), "lora_path"),
        (LoRARequest("x", 1, 5), "lora_path"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_is_an_error_at_the_call_that_names_it(request_: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        wire(request_)
    assert caught.value.param == "lora_request"


def test_several_prompts_may_have_an_adapter_each() -> None:
    sql, code = LoRARequest("sql", 1), LoRARequest("code", 2)
    options = RequestOptions(lora_request=[sql, None, code], priority=3)
    assert [each["lora_request"] for each in options_per_prompt(options, 3)] == [sql, None, code]
    assert {each["priority"] for each in options_per_prompt(options, 3)} == {3}
    assert options_per_prompt(RequestOptions(lora_request=sql), 2) == [{"lora_request": sql}] * 2
    with pytest.raises(InvalidRequest, match="3 for 2 prompts; give one, or one for each") as caught:
        options_per_prompt(options, 2)
    assert caught.value.param == "lora_request"
    with pytest.raises(InvalidRequest, match="must be a LoRARequest"):
        wire([sql])


def test_a_generation_request_takes_one() -> None:
    request = GenerationRequest([1, 2], lora_request=LoRARequest("sql", 3))
    assert build_request(HANDLE, request.submission()).adapter == AdapterRef("sql", 3, "", "")
    with pytest.raises(InvalidRequest, match="lora_config"):
        GenerationRequest([1, 2], lora_config=object()).check()  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="lora_request"):
        GenerationRequest([1, 2], lora_request="sql").check()  # type: ignore[arg-type]


WEIGHTS = {"x.lora_A.weight": np.zeros((2, 3), np.float32)}


@for_each(
    ("config", "reason"),
    [
        (LoraConfig(0), "task_id"),
        (LoraConfig(True), "task_id"),
        (LoraConfig(1 << 63), "task_id"),
        (LoraConfig(1, {}, {}), "weights must be arrays by their names"),
        (LoraConfig(1, np.zeros((2, 3)), {}), "weights must be arrays by their names"),  # type: ignore[arg-type]
        (LoraConfig(1, {"x": np.zeros(3)}, {}), "an array of float32, float16, bfloat16, got float64"),
        (LoraConfig(1, {"x": [1.0]}, {}), "an array of"),
        (LoraConfig(1, {1: WEIGHTS}, {}), "no text"),  # type: ignore[dict-item]
        (LoraConfig(1, WEIGHTS), "config must be what"),
        (LoraConfig(1, WEIGHTS, {"r": object()}), "config cannot be written as JSON"),
        (LoraConfig(1, None, {"r": 1}), "there are none"),
        ("x", "must be a LoraConfig"),
    ],
)
def test_weights_that_cannot_be_sent_are_an_error_at_the_call(config: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        build_request(HANDLE, Submission("x", options={"lora_config": config}))
    assert caught.value.param == "lora_config"


def test_weights_are_the_file_that_others_read(tmp_path: Path) -> None:
    packed = LoraConfig(1, {**WEIGHTS, "y": np.ones(5, np.float16)}, {"r": 2}).packed
    assert packed is not None
    (tmp_path / "x.safetensors").write_bytes(packed.weights)
    loaded = load_file(tmp_path / "x.safetensors")
    assert {name: (each.dtype.name, each.shape) for name, each in loaded.items()} == {
        "x.lora_A.weight": ("float32", (2, 3)),
        "y": ("float16", (5,)),
    }
    assert packed.config == b'{"peft_type": "LORA", "r": 2}'
    request = build_request(HANDLE, Submission("x", options={"lora_config": LoraConfig(9)}))
    assert request.adapter == AdapterRef("", 9, "", "")
    both: Any = {"lora_config": LoraConfig(9), "lora_request": LoRARequest("a", 1)}
    with pytest.raises(InvalidRequest, match="not both"):
        build_request(HANDLE, Submission("x", options=both))
