"""LoRARequest: what a caller may write, and what becomes of it on the wire."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from carousel import GenerationRequest, InvalidRequest, LoRARequest
from carousel.client.core.request_builder import Submission, build_request
from runtime.wire.handle import make_handle
from runtime.wire.plan import AdapterRef

HANDLE = make_handle(1, 2)


def wire(request: Any) -> AdapterRef | None:
    return build_request(HANDLE, Submission("x", options={"lora_request": request})).adapter


def test_a_request_names_its_adapter() -> None:
    assert wire(LoRARequest("sql", 3, "/adapters/sql")) == AdapterRef("sql", 3, "", "/adapters/sql")
    assert wire(LoRARequest("sql", 3)) == AdapterRef("sql", 3, "", "")
    assert wire(None) is None
    assert build_request(HANDLE, Submission("x")).adapter is None


def test_a_path_is_that_of_the_caller() -> None:
    ref = wire(LoRARequest("sql", 3, "here"))
    assert ref is not None
    assert ref.path == os.path.abspath("here")
    assert wire(LoRARequest("sql", 3, Path("/there"))) == AdapterRef("sql", 3, "", "/there")  # type: ignore[arg-type]


@pytest.mark.parametrize(
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


def test_a_generation_request_takes_one() -> None:
    request = GenerationRequest([1, 2], lora_request=LoRARequest("sql", 3))
    assert build_request(HANDLE, request.submission()).adapter == AdapterRef("sql", 3, "", "")
    with pytest.raises(InvalidRequest, match="lora_config"):
        GenerationRequest([1, 2], lora_config=object())
    with pytest.raises(InvalidRequest, match="lora_request"):
        GenerationRequest([1, 2], lora_request="sql").check()  # type: ignore[arg-type]
