"""Requests as the wire carries them: options, spellings, and refusals by name."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from carousel.client.core.labels import LabelBook
from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.sampling_forms import normalize
from carousel.client.core.request.submission import OTHERS_OPTIONS, RequestOptions, Submission
from carousel.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_TEMPLATE_VALUES
from runtime.wire.handle import make_handle
from runtime.wire.messages import GenerateRequest
from runtime.wire.retention import RetainedRange, Retention
from runtime.wire.sampling_params import SamplingParams
from tests.harness.cases import for_each

HANDLE = make_handle(1, 2)
CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]


def build(
    prompt: Any = "x", *, stream: bool = False, sampling: Any = None, **options: Any
) -> GenerateRequest:
    submission = Submission(prompt, SamplingParams(**(sampling or {})), stream, cast(RequestOptions, options))
    return build_request(HANDLE, submission)


def test_the_defaults_ask_for_nothing_special() -> None:
    request = build(CHAT)
    assert request.add_generation_prompt
    assert not request.continue_final_message
    assert request.template_kwargs == b""
    assert request.time_limit_ms == 0
    assert (request.sampling.n, request.sampling.best_of) == (1, None)


def test_the_time_of_arrival_is_now_unless_it_is_given() -> None:
    before = time.time()
    assert before <= build().arrival_time <= time.time()
    assert build(arrival_time=12).arrival_time == 12.0


@pytest.mark.parametrize(("seconds", "milliseconds"), [(1, 1000), (0.0001, 1), (2.5004, 2501)])
def test_a_time_limit_becomes_milliseconds_and_never_none(seconds: float, milliseconds: int) -> None:
    assert build(time_limit=seconds).time_limit_ms == milliseconds


def test_continuing_a_message_leaves_out_the_header_of_the_next_one() -> None:
    request = build(CHAT, continue_final_message=True)
    assert request.continue_final_message
    assert not request.add_generation_prompt
    assert not build(CHAT, add_generation_prompt=False).add_generation_prompt


def test_variables_of_the_template_are_a_msgpack_map() -> None:
    values = {"enable_thinking": False, "tools": [{"name": "f"}]}
    assert msgspec.msgpack.decode(build(CHAT, chat_template_kwargs=values).template_kwargs) == values
    assert build("x", chat_template_kwargs={}).template_kwargs == b""


def test_best_of_is_the_number_of_sequences_and_brings_logprobs_to_choose_by() -> None:
    chosen = build(sampling={"n": 2, "best_of": 5}).sampling
    assert (chosen.n, chosen.best_of, chosen.logprobs) == (5, None, 0)
    chosen = build(sampling={"best_of": 5, "logprobs": 3}).sampling
    assert (chosen.n, chosen.logprobs) == (5, 3)
    same = build(sampling={"n": 3, "best_of": 3}, stream=True).sampling
    assert (same.n, same.best_of, same.logprobs) == (3, None, None)


@for_each(
    ("name", "spelled", "wire"),
    [
        ("bad_words", "no", ("no",)),
        ("bad_words", ["no", "never"], ("no", "never")),
        ("bad_words", None, ()),
        ("allowed_token_ids", [1, 2], (1, 2)),
        ("top_p_reset_ids", [1], (1,)),
        ("stop_words_ids", [[1, 2], [3]], ((1, 2), (3,))),
        ("bad_words_ids", [(1,)], ((1,),)),
        ("stop_words_ids", None, ()),
    ],
)
def test_lists_are_understood(name: str, spelled: Any, wire: Any) -> None:
    assert getattr(build(sampling={name: spelled}).sampling, name) == wire


def test_numpys_float_is_a_number_like_any_other() -> None:
    half = np.float64(0.5)
    spelled = {"temperature": half, "min_p": half, "logit_bias": {3: half}, "top_n_sigma": half}
    plain = {"temperature": 0.5, "min_p": 0.5, "logit_bias": {3: 0.5}, "top_n_sigma": 0.5}
    sent, wanted = (build(sampling={"seed": 1} | each).sampling for each in (spelled, plain))
    assert msgspec.msgpack.encode(sent) == msgspec.msgpack.encode(wanted)


@for_each(
    ("prompt", "sampling", "options", "param"),
    [
        ("x", {}, {"time_limit": 0}, "time_limit"),
        ("x", {}, {"time_limit": -1.0}, "time_limit"),
        ("x", {}, {"time_limit": math.nan}, "time_limit"),
        ("x", {}, {"time_limit": math.inf}, "time_limit"),
        ("x", {}, {"time_limit": 1e7}, "time_limit"),
        ("x", {}, {"time_limit": 10**400}, "time_limit"),
        ("x", {}, {"arrival_time": 10**400}, "arrival_time"),
        ("x", {"temperature": 10**400}, {}, "temperature"),
        ("x", {"temperature": 10**5000}, {}, "temperature"),
        ("x", {"max_tokens": -(10**5000)}, {}, "max_tokens"),
        ("x", {}, {"time_limit": True}, "time_limit"),
        ("x", {}, {"time_limit": "1"}, "time_limit"),
        ("x", {}, {"arrival_time": -1.0}, "arrival_time"),
        ("x", {}, {"arrival_time": math.nan}, "arrival_time"),
        ("x", {}, {"arrival_time": "now"}, "arrival_time"),
        ("x", {}, {"continue_final_message": True}, "continue_final_message"),
        ([1], {}, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        (
            CHAT,
            {},
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (CHAT, {}, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        (CHAT, {}, {"chat_template_kwargs": {1: 2}}, "chat_template_kwargs"),
        (CHAT, {}, {"chat_template_kwargs": {"a": object()}}, "chat_template_kwargs"),
        (CHAT, {}, {"chat_template_kwargs": {"a": "x" * 70000}}, "chat_template_kwargs"),
        (CHAT, {}, {"chat_template_kwargs": {"a": 1 << 70}}, "chat_template_kwargs"),
        (CHAT, {}, {"chat_template_kwargs": {"a": [[]] * MAX_TEMPLATE_VALUES}}, "chat_template_kwargs"),
        ("x", {}, {"priority": True}, "priority"),
        ("x", {}, {"priority": 1001}, "priority"),
        ("x", {}, {"add_special_tokens": "no"}, "add_special_tokens"),
        (CHAT, {}, {"add_generation_prompt": 1}, "add_generation_prompt"),
        (CHAT, {}, {"continue_final_message": "yes"}, "continue_final_message"),
        ("x", {"n": 0}, {}, "n"),
        ("x", {"n": 129}, {}, "n"),
        ("x", {"n": True}, {}, "n"),
        ("x", {"n": 3, "best_of": 2}, {}, "best_of"),
        ("x", {"best_of": 129}, {}, "best_of"),
        ("x", {"best_of": 2}, {"stream": True}, "best_of"),
        ("x", {"stop_words_ids": [1]}, {}, "stop_words_ids"),
        ("x", {"bad_words_ids": [[]]}, {}, "bad_words_ids"),
        ("x", {"bad_words": [""]}, {}, "bad_words"),
        ("x", {"allowed_token_ids": 5}, {}, "allowed_token_ids"),
        ("x", {"prompt_logprobs": 21}, {}, "prompt_logprobs"),
        ("x", {"return_context_logits": 1}, {}, "return_context_logits"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(
    prompt: Any, sampling: dict[str, Any], options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(prompt, sampling=sampling, **options)
    assert caught.value.param == param
    assert param in caught.value.message


def test_retention_has_a_short_form_and_takes_durations_either_way() -> None:
    assert build().retention is None
    short = build(kv_cache_retention_config=KvCacheRetentionConfig(max_tokens=1024)).retention
    assert short == Retention((RetainedRange(0, 1024, 100),))
    ranges = [TokenRangeRetentionConfig(0, 8, 90, 500), TokenRangeRetentionConfig(8, None, 10)]
    config = KvCacheRetentionConfig(ranges, 60, timedelta(seconds=2))
    assert build(kv_cache_retention_config=config).retention == Retention(
        (RetainedRange(0, 8, 90, 500), RetainedRange(8, None, 10)), 60, 2000
    )


@for_each(
    ("config", "says"),
    [
        (7, "must be KvCacheRetentionConfig, got int"),
        (KvCacheRetentionConfig(max_tokens=0), "token_end must be an integer from 1"),
        (
            KvCacheRetentionConfig([TokenRangeRetentionConfig(0)], max_tokens=5),
            "max_tokens is the short form",
        ),
        (
            KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 5, 101)]),
            r"\[0\].priority must be .* 0 to 100",
        ),
        (KvCacheRetentionConfig([TokenRangeRetentionConfig(5, 5)]), "ends at 5, it begins at 5"),
        (
            KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 5), TokenRangeRetentionConfig(4, 8)]),
            r"\[1\] begins at 4, within the range before it",
        ),
        (
            KvCacheRetentionConfig([TokenRangeRetentionConfig(0), TokenRangeRetentionConfig(4, 8)]),
            "only the last range may have no end",
        ),
        (KvCacheRetentionConfig([cast(Any, (0, 5))]), r"\[0\] must be TokenRangeRetentionConfig, got tuple"),
        (KvCacheRetentionConfig([TokenRangeRetentionConfig(0)] * 65), "a list of at most 64"),
        (KvCacheRetentionConfig(decode_retention_priority=-1), "decode_retention_priority must be"),
        (KvCacheRetentionConfig(decode_duration_ms=0), "decode_duration_ms must be an integer from 1"),
    ],
)
def test_wrong_retention_is_refused_by_name(config: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        build(kv_cache_retention_config=config)
    assert caught.value.param == "kv_cache_retention_config"


@for_each(
    ("given", "sent"),
    [(7, 7), (-5, (1 << 63) - 5), (-(1 << 63), 0), ((1 << 63) + 9, 9), ((1 << 64) - 1, (1 << 63) - 1)],
)
def test_a_seed_of_64_bits_is_sent_as_one_of_63(given: int, sent: int) -> None:
    assert normalize(SamplingParams(seed=given)).seed == sent


@pytest.mark.parametrize("given", [False, 1 << 64, -(1 << 63) - 1])
def test_what_is_no_seed_is_not_made_one(given: int) -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        normalize(SamplingParams(seed=given))


def test_none_for_an_argument_counts_as_not_given() -> None:
    nothing: dict[str, Any] = dict.fromkeys(RequestOptions.__annotations__.keys() | OTHERS_OPTIONS)
    plain = build(sampling={"seed": 1}, arrival_time=1.0)
    assert build(sampling={"seed": 1}, **(nothing | {"arrival_time": 1.0})) == plain
    with pytest.raises(TypeError, match="unexpected keyword argument 'time_limits'"):
        build(time_limits=None, priority=None)


def test_an_argument_that_there_is_not_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'time_limits'"):
        build(time_limits=3)


def test_a_label_has_one_holder_at_a_time_and_only_he_releases_it() -> None:
    book = LabelBook()
    book.hold("a", "mine", 1)
    book.hold("b", "mine", 2)
    with pytest.raises(InvalidRequest, match="label: a request labelled 'mine' is in flight"):
        book.hold("a", "mine", 3)
    book.release("a", "mine", 3)
    with pytest.raises(InvalidRequest):
        book.hold("a", "mine", 3)
    book.release("a", "mine", 1)
    book.hold("a", "mine", 3)
    assert len(book) == 2


def test_a_label_that_two_threads_release_at_once_is_free() -> None:
    """A caller who leaves a request while it is made again releases it beside the connection's thread."""
    book = LabelBook()

    class Holder:
        def __eq__(self, other: object) -> bool:
            book.release("a", "mine", 1)  # what the other thread does in between
            return True

    book.hold("a", "mine", 1)
    book.release("a", "mine", Holder())
    assert len(book) == 0


@for_each("role", ["system", "user", "assistant", "tool"])
def test_content_may_be_parts_of_text(role: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = build([{"role": role, "content": parts}]).messages or ()
    assert (message.role, message.content) == (role, "a\nb")


@for_each(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "image_url"),
        ({"type": "text"}, "text"),
        ({"type": "text", "text": 1}, r"content\[1\]\.text"),
        ("x", r"content\[1\]"),
    ],
)
def test_parts_of_another_kind_are_refused_by_name(part: Any, named: str) -> None:
    content = [{"type": "text", "text": "a"}, part]
    with pytest.raises(InvalidRequest, match=f"^messages: .*{named}") as refused:
        build([{"role": "tool", "content": content}])
    assert refused.value.param == "messages"
