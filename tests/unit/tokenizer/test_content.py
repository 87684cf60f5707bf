"""Digests by which suspects are known again: the same for all attempts of a sequence, for nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from carousel.client.core.state.sequence_state import SequenceState
from runtime.ring.suspects.content import content_of_request
from runtime.sampling.table import SEEDS
from runtime.text.tokenizer import Tokenizer
from runtime.wire.handle import sequence_key
from runtime.wire.messages import GenerateRequest
from runtime.wire.sampling_params import SamplingParams
from tests.harness.cases import for_each
from tests.harness.ring.tokenizer_ring import Ring, passed_on, request

SECRET = b"s" * 32
PLAIN = SamplingParams(seed=5, max_tokens=9, stop=("x",))
ALL = SamplingParams(
    n=3, seed=SEEDS - 1, max_tokens=9, prompt_logprobs=2, prompt_logprobs_start=1, return_context_logits=True
)


def attempts(asked: GenerateRequest) -> list[GenerateRequest]:
    """Return what a client submits again for each sequence, with output that has come, the second time."""
    again: list[GenerateRequest] = []
    for index in range(asked.sampling.n):
        state = SequenceState(asked, index, wants_logprobs=False)
        for left_ms in (900, 800):
            message = state.next_attempt(asked, left_ms, 1.0)
            assert message is not None
            again.append(message)
            state.ids += b"\1\0\0\0"
    return again


@pytest.mark.parametrize("sampling", [PLAIN, ALL], ids=["one", "several"])
def test_a_sequence_has_the_same_content_in_all_attempts(demo: Tokenizer, sampling: SamplingParams) -> None:
    asked = request(1, text="Once", sampling=sampling, time_limit_ms=1000, label="mine")
    ring = Ring(demo)
    first = {sequence_key(each.handle): each.content for each in passed_on(ring, asked)}
    assert len(first) == sampling.n
    again = passed_on(ring, *attempts(asked))
    assert len(again) == 2 * sampling.n
    assert all(each.content == first[sequence_key(each.handle)] for each in again)
    assert len({content_of_request(each, SECRET) for each in [asked, *attempts(asked)]}) == 1


@for_each(
    "changes",
    [
        {"text": "once"},
        {"tenant": "b"},
        {"cache_salt": "c"},
        {"sampling": msgspec.structs.replace(PLAIN, seed=6)},
        {"sampling": msgspec.structs.replace(PLAIN, max_tokens=1)},
        {"sampling": msgspec.structs.replace(PLAIN, prompt_logprobs=1)},
    ],
)
def test_something_else_under_the_same_name_has_another_content(
    demo: Tokenizer, changes: dict[str, Any]
) -> None:
    asked = {"text": "Once", "sampling": PLAIN}
    first, other = passed_on(Ring(demo), request(1, **asked), request(1, **asked | changes))
    assert first.handle == other.handle
    assert first.content != other.content


def test_nobody_without_the_key_of_the_launch_knows_a_content() -> None:
    asked = request(1, text="Once")
    assert content_of_request(asked, SECRET) != content_of_request(asked, b"t" * 32)
