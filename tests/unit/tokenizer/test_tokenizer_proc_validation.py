"""tokenizer_proc.validation: every refusal names its field, and nothing wrong gets through."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.base.errors import InvalidRequest, Overloaded
from runtime.wire.error_info import error_info
from runtime.wire.format import MAX_TEMPLATE_VALUES, pack_ids
from runtime.wire.guide import Guide
from runtime.wire.handle import make_handle
from runtime.wire.messages import ChatMessage, GenerateRequest, Resume
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessStatus
from tests.harness.cases import for_each
from tokenizer_proc.validation import QueueBound, Validator

VALIDATOR = Validator(vocab_size=100, context_length=32)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"handle": make_handle(1, 1), "sampling": SamplingParams(seed=1), **fields})


def refusal(bad: GenerateRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check(bad)
    return caught.value


def check(checked: GenerateRequest) -> None:
    if VALIDATOR.check_request(checked) == "input_ids":
        VALIDATOR.input_ids(checked)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "x"}, "text"),
        ({"input_ids": pack_ids([99])}, "input_ids"),
        ({"messages": (ChatMessage("user", "x"),)}, "messages"),
    ],
)
def test_a_prompt_comes_in_one_of_three_forms(fields: dict[str, Any], expected: str) -> None:
    assert VALIDATOR.check_request(request(**fields)) == expected


@pytest.mark.parametrize(
    "fields", [{}, {"text": "x", "input_ids": pack_ids([1])}, {"text": "", "messages": ()}]
)
def test_none_or_several_forms_are_refused(fields: dict[str, Any]) -> None:
    assert refusal(request(**fields)).param == "prompt"


@for_each(
    ("fields", "param"),
    [
        ({"text": "x", "sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"text": "x", "sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"text": "x", "sampling": SamplingParams(stop_token_ids=(100,))}, "stop_token_ids"),
        ({"text": "x", "sampling": SamplingParams(logit_bias=((100, 1.0),))}, "logit_bias"),
        ({"input_ids": pack_ids([0, 100])}, "input_ids"),
        ({"input_ids": pack_ids([-1])}, "input_ids"),
        ({"input_ids": b"abc"}, "input_ids"),
        ({"text": "x", "resume": Resume(output_ids=pack_ids([100]))}, "resume"),
        ({"text": "x", "resume": Resume(output_ids=b"abcde")}, "resume"),
        ({"text": "x", "resume": Resume(output_ids=pack_ids([5] * 33))}, "resume"),
        ({"text": "x", "resume": Resume(cumulative_logprob=float("nan"))}, "resume"),
        ({"text": "x", "resume": Resume(cumulative_logprob=-float("inf"))}, "resume"),
        ({"text": "x", "resume": Resume(), "sampling": SamplingParams(n=2)}, "resume"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(request(**fields))
    assert (error.param, error.status) == (param, 400)


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        VALIDATOR.check_messages(request(messages=()))


@pytest.mark.parametrize(("n", "size", "ok"), [(1, 1 << 18, True), (8, 1 << 17, True), (9, 1 << 17, False)])
def test_a_guide_is_sent_with_only_so_many_sequences(n: int, size: int, ok: bool) -> None:
    """Eight requests for 128 sequences each with a guide of 120 KB took the grammar process 170 MB."""
    asked = request(text="x", sampling=SamplingParams(seed=1, n=n), guide=Guide("regex", "a" * size))
    if ok:
        assert VALIDATOR.check_request(asked) == "text"
        return
    error = refusal(asked)
    assert error.param == "n"
    assert "ask for fewer" in error.message


@pytest.mark.parametrize("more", [{}, {"b": {}}, {"b": [1, [2, 3]]}])
def test_variables_of_the_template_have_only_so_many_values(more: dict[str, Any]) -> None:
    """43,000 empty lists in 64 KiB took the template 0.1 s."""
    variables = {"a": [[]] * (MAX_TEMPLATE_VALUES - 1), **more}
    asked = request(template_kwargs=msgspec.msgpack.encode(variables))
    if not more:
        assert VALIDATOR.template_kwargs(asked) == variables
        return
    with pytest.raises(InvalidRequest, match="at most 4096 values") as caught:
        VALIDATOR.template_kwargs(asked)
    assert caught.value.param == "chat_template_kwargs"


@for_each(("num_tokens", "max_len", "ok"), [(31, 0, True), (32, 0, False), (15, 16, True), (16, 16, False)])
def test_a_prompt_must_leave_room_for_one_token_of_output(num_tokens: int, max_len: int, ok: bool) -> None:
    ids = np.ones(num_tokens, np.int32)
    if ok:
        VALIDATOR.check_prompt("text", ids, max_len)
        return
    with pytest.raises(InvalidRequest, match=f"{num_tokens} tokens.* {max_len or 32} tokens") as caught:
        VALIDATOR.check_prompt("text", ids, max_len)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "text")


def test_a_prompt_that_is_computed_whole_must_fit_a_step() -> None:
    validator = Validator(vocab_size=100, context_length=32, max_prompt_len=8)
    validator.check_prompt("text", np.zeros(8, np.int32), 0)
    with pytest.raises(InvalidRequest, match=r"9 tokens.*at most 8 \(--chunked-prefill-size\)") as caught:
        validator.check_prompt("text", np.zeros(9, np.int32), 0)
    assert (caught.value.param, caught.value.code) == ("text", "context_length_exceeded")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty") as caught:
        VALIDATOR.check_prompt("messages", np.zeros(0, np.int32), 0)
    assert caught.value.param == "messages"


def test_a_full_ring_refuses_with_a_time_to_try_again() -> None:
    admission = QueueBound(max_waiting=4, max_waiting_of_client=4, max_running=2)
    with pytest.raises(Overloaded, match="try again in") as caught:
        admission.check(ProcessStatus(num_running=2, num_waiting=4), 0)
    assert caught.value.status == 503
    assert caught.value.retry_after_s > 0
    assert error_info(caught.value).retry_after_s == caught.value.retry_after_s


def test_only_a_refusal_that_will_pass_says_when_to_try_again() -> None:
    assert error_info(InvalidRequest("no", param="n")).retry_after_s == 0.0


def test_requests_on_their_way_to_the_scheduler_count() -> None:
    admission = QueueBound(max_waiting=4, max_waiting_of_client=4, max_running=2)
    status = ProcessStatus(num_running=1, num_waiting=2)
    for num_on_way in range(3):  # two may wait, one finds a free row
        admission.check(status, num_on_way)
    with pytest.raises(Overloaded):
        admission.check(status, 3)


def test_rows_that_ended_requests_have_just_left_count_as_room() -> None:
    QueueBound(max_waiting=4, max_waiting_of_client=4, max_running=2).check(
        ProcessStatus(num_running=0, num_waiting=4), 0
    )


@for_each(
    ("wanted", "max_tokens", "max_len", "kept"),
    [
        (None, 16, 0, 40),
        (5, 16, 0, 5),
        (31, 16, 0, 31),
        (32, 16, 0, 31),  # one token is the output's
        (-1, 16, 0, 16),
        (-1, None, 0, 31),
        (-1, 32, 0, 31),
        (-1, 1, 0, 31),
        (-1, 4, 20, 16),
        (30, 4, 20, 19),
    ],
)
def test_truncation_keeps_the_last_tokens(
    wanted: int | None, max_tokens: int | None, max_len: int, kept: int
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=wanted)
    ids = np.arange(40, dtype=np.int32)
    assert VALIDATOR.truncated(sampling, ids, max_len).tolist() == list(range(40 - kept, 40))
    assert len(VALIDATOR.truncated(sampling, ids[:3], max_len)) == 3


def test_truncation_knows_a_prompt_that_is_computed_in_one_step() -> None:
    validator = Validator(vocab_size=100, context_length=32, max_prompt_len=8)
    ids = np.arange(40, dtype=np.int32)
    sampling = SamplingParams(max_tokens=1, truncate_prompt_tokens=-1)
    assert len(validator.truncated(sampling, ids, 0)) == 8


@for_each("wanted", [0, -2, 33, True, 1.5])
def test_truncation_has_bounds(wanted: Any) -> None:
    error = refusal(request(text="x", sampling=SamplingParams(truncate_prompt_tokens=wanted)))
    assert error.param == "truncate_prompt_tokens"
