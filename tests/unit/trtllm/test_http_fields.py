"""Names of a request's parts in TensorRT-LLM's API: an HTTP body that has one is not served without it."""

from __future__ import annotations

import inspect

from carousel.trtllm.generation_request import NOT_BUILT, GenerationRequest
from carousel.trtllm.inference_request import KNOWN, SPELLINGS
from tests.unit.server.test_unknown_fields import check_is_known

NAMES = {
    *(set(inspect.signature(GenerationRequest).parameters) - {"sampling_params", "others"}),
    *(*NOT_BUILT, *KNOWN, *SPELLINGS),
}


def test_a_part_of_a_request_is_read_or_refused_by_name_over_http() -> None:
    for name in sorted(NAMES):
        check_is_known(name)
