"""docs/executor.md and docs/batch_manager.md name everything that a caller can give or gets."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from carousel.trtllm.executor import GenerationExecutor
from carousel.trtllm.executor_config import ExecutorConfig, KvCacheConfig, SchedulerConfig
from carousel.trtllm.executor_stats import ExecutorStats
from carousel.trtllm.generation_request import NOT_BUILT, GenerationRequest
from carousel.trtllm.inference_request import KNOWN, SPELLINGS
from carousel.trtllm.output_tensors import OutputTensors
from carousel.trtllm.responses import Response, Result
from runtime.wire.sampling_params import SamplingParams

DOCS = Path(__file__).resolve().parents[3] / "docs"


def named_in(document: str) -> set[str]:
    """Every name within a code span or a code block."""
    text = (DOCS / document).read_text()
    return {name for span in re.findall(r"`+([^`]+)`+", text) for name in re.findall(r"[a-z]\w+", span)}


def parameters_of(function: object) -> set[str]:
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - {"self"}


def fields_of(*classes: type) -> set[str]:
    return {
        each.name for kind in classes for each in dataclasses.fields(kind) if not each.name.startswith("_")
    }


def test_every_option_of_a_request_is_named_also_those_that_are_refused() -> None:
    names = named_in("executor.md")
    assert parameters_of(GenerationRequest) | NOT_BUILT <= names


def test_every_argument_of_create_and_every_field_of_a_response_is_named() -> None:
    names = named_in("executor.md")
    assert parameters_of(GenerationExecutor.create) - {"connect_timeout"} <= names
    assert fields_of(ExecutorConfig, SchedulerConfig, KvCacheConfig) <= names
    assert fields_of(Response, Result, ExecutorStats) <= names


def test_every_input_and_output_tensor_of_the_callbacks_is_named() -> None:
    names = named_in("batch_manager.md")
    assert KNOWN | set(SPELLINGS) <= names
    request = GenerationRequest([1], SamplingParams())
    tensors = OutputTensors(request, padding_id=0, max_len=8).of(Result(0, True, True, [[2]], ""))
    assert {each.name for each in tensors} <= names
