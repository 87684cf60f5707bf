"""SharedParts: what the sequences of one request have in common is kept once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime.wire.format import pack_ids
from runtime.wire.guide import Guide
from runtime.wire.handle import make_handle
from runtime.wire.messages import TokenizedRequest
from runtime.wire.plan import ProcessorCall
from runtime.wire.retention import RetainedRange, Retention
from runtime.wire.sampling_params import SamplingParams
from scheduler_proc.intake.shared_parts import SharedParts

SAMPLING = SamplingParams(
    n=4,
    seed=7,
    prompt_logprobs=1,
    logit_bias=tuple((number, 1.5) for number in range(300)),
    bad_words_ids=((1, 2), (3,)),
)
FIELDS: dict[str, Any] = {
    "input_ids": pack_ids(range(1000)),
    "guide": Guide("regex", "a{5}" * 1000),
    "draft_ids": pack_ids(range(10, 20)),
    "prediction_ids": pack_ids(range(500)),
    "processors": (ProcessorCall("name", b'{"a": 1}' * 10),),
    "retention": Retention((RetainedRange(0, 5, 90),)),
}


def received(seq: int, number: int, **changed: Any) -> TokenizedRequest:
    """A sequence of a request as it comes out of a frame: nothing of it belongs to another one."""
    fields = {"sampling": SAMPLING.of_sequence(number), **FIELDS, **changed}
    message = TokenizedRequest(handle=make_handle(1, seq, number), stream_open=msgspec.Raw(b"\xc0"), **fields)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=TokenizedRequest)


def parts_of(message: TokenizedRequest) -> dict[str, Any]:
    sampling = message.sampling
    parts = {name: getattr(message, name) for name in FIELDS}
    return parts | {"biases": sampling.logit_bias, "words": sampling.bad_words_ids}


def test_sequences_of_a_request_have_the_same_parts() -> None:
    """Eight requests of 8 KB with a thousand biases for 128 sequences each took 118 MB."""
    shared = SharedParts()
    sent = [received(1, number) for number in range(4)]
    kept = [shared.share(message) for message in sent]
    assert kept == sent
    # The first one alone has the logprobs of the prompt, so its parameters differ.
    for message in kept[2:]:
        for name, part in parts_of(message).items():
            assert part is parts_of(kept[1])[name], name


@pytest.mark.parametrize(
    "changed", [{"guide": None}, {"input_ids": pack_ids([1])}, {"sampling": SamplingParams(seed=1)}]
)
def test_what_differs_stays_as_it_is(changed: dict[str, Any]) -> None:
    shared = SharedParts()
    sent = [received(1, 1), received(1, 2, **changed), received(1, 3)]
    assert [shared.share(message) for message in sent] == sent


def test_other_requests_share_nothing() -> None:
    shared = SharedParts()
    first, other = shared.share(received(1, 0)), received(2, 0)
    kept = shared.share(other)
    assert kept is other
    assert kept.input_ids is not first.input_ids
