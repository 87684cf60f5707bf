"""Fields that a body does not declare are taken, refused by name, or named back."""

from __future__ import annotations

import json
import logging
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from carousel.conversation import conversation
from carousel.server.guides import asked_guide
from carousel.server.openai.embedding_types import EmbeddingBody
from carousel.server.openai.types import ChatBody, CompletionBody
from carousel.server.request import unknown_fields
from carousel.server.request.decode import SMALL_BODY_BYTES, decode_body
from carousel.server.request.field_table import FIELD_TABLES
from carousel.server.request.large_fields import PromptLimits
from carousel.server.request.large_json import BodyBytes
from carousel.server.request.peer_fields import REFUSED, TAKEN
from carousel.server.request.unknown_fields import MAX_LOGGED, MAX_UNKNOWN, FieldFilter, IgnoredLog, nearest
from carousel.server.sglang.generate_types import GenerateBody, GenerateSampling
from carousel.server.sglang.tokenize_types import TokenizeBody
from runtime.base.errors import InvalidRequest
from runtime.wire.sampling_params import SamplingParams
from tests.harness.cases import for_each
from tests.harness.http.bad_input import HTTP_CASES

KINDS = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/generate": GenerateBody}
USER = {"role": "user", "content": "x"}
BODIES: dict[Any, dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [USER]},
    GenerateBody: {"text": "x"},
}


async def no_wait(_: int) -> None:
    pass


def decoded(data: bytes, kind: Any, fields: FieldFilter) -> Any:
    """Decode a body in one turn: nothing waits, so no loop is needed, which takes longer to make."""
    try:
        decode_body(BodyBytes(data), kind, PromptLimits(1 << 16), no_wait, fields).send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def read(kind: Any, policy: Any = "warn", **body: Any) -> tuple[Any, list[str]]:
    """Return the body as it is decoded, and the fields that are named back."""
    fields = FieldFilter(policy, no_wait)
    data = json.dumps(body).encode()
    return decoded(data, kind, fields), fields.ignored


def refusal(kind: Any, policy: Any = "warn", **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        raise AssertionError((body, read(kind, policy, **body)))
    assert caught.value.param
    assert caught.value.param in caught.value.message
    return caught.value


def chat(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, {**USER, **message}]}


@for_each("padding", ["", "x" * SMALL_BODY_BYTES])
@for_each(
    ("kind", "name", "value", "part"),
    [
        (CompletionBody, "logits_processors", "mine", "code never comes in a request"),
        (ChatBody, "logits_processors", ["mine"], '[{"name": "NAME", "args": {}}]'),
        (GenerateBody, "logits_processors", "mine", '[{"name": "NAME", "args": {}}]'),
        (GenerateBody, "sampling_params", 3, '{"max_new_tokens": 32}'),
        (CompletionBody, "stream_options", True, '{"include_usage": true}'),
        (ChatBody, "tool_choice", 3, '"auto" or {"type": "function"'),
        (ChatBody, "messages", ["hi"], '[{"role": "user", "content": "TEXT"}]'),
    ],
)
def test_what_is_no_object_is_refused_with_one(
    kind: Any, name: str, value: Any, part: str, padding: str
) -> None:
    body = {key: given if key == "messages" else given + padding for key, given in BODIES[kind].items()}
    error = refusal(kind, **{**body, name: value})
    assert str(error.param).partition("[")[0] == name
    assert f"; it is written as {part}" in error.message or f"; {part}" in error.message


@for_each("padding", ["", "x" * SMALL_BODY_BYTES])
@for_each(
    ("name", "value", "part"),
    [
        ("response_format", {"type": "json"}, ".type: Invalid enum value 'json'; it is one of json_object, "),
        ("reasoning_effort", "extreme", "it is one of high, "),
        ("tool_choice", "f", 'auto, none, required; it is written as "auto" or {"type": "function"'),
    ],
)
def test_a_word_that_is_none_of_a_list_is_refused_with_the_list(
    name: str, value: Any, part: str, padding: str
) -> None:
    messages = [{"role": "user", "content": "x" + padding}]
    assert part in refusal(ChatBody, messages=messages, **{name: value}).message


@for_each("data", [b"null", b"[]", b'"text"', b"[" + b"1," * SMALL_BODY_BYTES + b"1]"])
def test_what_is_no_object_at_all_is_called_the_body(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^the body: Expected `object`, got "):
        decoded(data, CompletionBody, FieldFilter("warn", no_wait))


def test_where_no_guide_or_two_are_given_those_that_there_are_are_named() -> None:
    for given, said in (({}, "none"), ({"regex": "a", "json": {}}, "json and regex")):
        body, _ = read(CompletionBody, prompt="x", structured_outputs=given)
        with pytest.raises(InvalidRequest) as caught:
            asked_guide(body)
        fields = "json, regex, choice, grammar, json_object, structural_tag"
        assert caught.value.message == f"structured_outputs: give one of {fields}; got {said}"


@pytest.mark.parametrize("padding", ["", "x" * SMALL_BODY_BYTES], ids=["small", "large"])
def test_unknown_fields_are_left_out_and_named(padding: str) -> None:
    body, ignored = read(CompletionBody, prompt="x" + padding, odd={"a": [1]}, odder=2, max_tokens=3)
    assert (body.prompt, body.max_tokens, ignored) == ("x" + padding, 3, ["odd", "odder"])
    messages = [USER, {**USER, "odd": 1, "content": [{"type": "text", "text": "y" + padding, "odd": 2}]}]
    body, ignored = read(ChatBody, messages=messages)
    assert body.messages[1].content[0].text == "y" + padding
    assert sorted(ignored) == ["messages.content.odd", "messages.odd"]


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionBody, {"prompt": "x", "odd": 1}, "odd"),
        (CompletionBody, {"prompt": "x", "stream_options": {"odd": 1}}, "stream_options.odd"),
        (GenerateBody, {"text": "x", "sampling_params": {"odd": 1}}, "sampling_params.odd"),
        (ChatBody, chat(odd=1), "messages[1].odd"),
        (ChatBody, chat(content=[{"type": "text", "text": "x", "odd": 1}]), "messages[1].content[0].odd"),
        (EmbeddingBody, {"input": "x", "odd": 1}, "odd"),
        (TokenizeBody, {"prompt": "x", "max_tokens": 1}, "max_tokens"),
    ],
)
@pytest.mark.parametrize("padding", [0, SMALL_BODY_BYTES], ids=["small", "large"])
def test_one_policy_refuses_them_and_another_says_nothing(
    kind: Any, body: dict[str, Any], param: str, padding: int
) -> None:
    field = next(name for name in ("prompt", "text", "input", "messages") if name in body)
    if isinstance(body[field], str):
        body = {**body, field: "x" * (1 + padding)}
    else:
        body = {**body, field: [{**body[field][0], "content": "x" * (1 + padding)}, *body[field][1:]]}
    error = refusal(kind, "refuse", **body)
    assert (error.param, error.code) == (param, "unknown_parameter")
    assert read(kind, "ignore", **body)[1] == []
    assert len(read(kind, "warn", **body)[1]) == 1


@for_each("blank", [" ", "\t", "\n", "\r"])
@for_each("padding", ["", "x" * SMALL_BODY_BYTES])
def test_blanks_before_an_object_change_nothing(blank: str, padding: str) -> None:
    fields = FieldFilter("warn", no_wait)
    data = f'{blank * 70}{{"prompt": "x{padding}", "stream_options":{blank * 70}{{"odd": 1}}, "odd": 1}}'
    decoded(data.encode(), CompletionBody, fields)
    assert sorted(fields.ignored) == ["odd", "stream_options.odd"]


@pytest.mark.parametrize("policy", ["warn", "refuse", "ignore"])
def test_a_null_is_never_unknown(policy: Any) -> None:
    sampling = {"stop_regex": None, "odd": None}
    assert not read(GenerateBody, policy, text="x", regex=None, odd=None, sampling_params=sampling)[1]
    nulls = dict.fromkeys((*REFUSED, *TAKEN, "max_token"), None)
    assert not read(CompletionBody, policy, prompt="x", **nulls)[1]
    assert not read(ChatBody, policy, **chat(odd=None, refusal=None, audio=None, function_call=None))[1]


@pytest.mark.parametrize("policy", ["warn", "refuse"])
def test_what_the_sdks_send_and_changes_nothing_is_taken(policy: Any) -> None:
    labels = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "verbosity": "low",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "prompt_cache_retention": "24h",
        "parallel_tool_calls": True,
        "no_logs": True,
    }
    assert read(ChatBody, policy, messages=[USER], **labels)[1] == []
    own = {"annotations": [], "cache_control": {"type": "ephemeral"}, "refusal": "I cannot do that."}
    assert read(ChatBody, policy, **chat(**own))[1] == []


@for_each("policy", ["warn", "refuse", "ignore"])
@for_each(
    ("kind", "body", "param", "part"),
    [
        (CompletionBody, {"prompt": "x", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", ""),
        (
            CompletionBody,
            {"prompt": "x", "structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "not supported",
        ),
        (CompletionBody, {"prompt": "x", "lora_path": "a"}, "lora_path", "not supported"),
        (CompletionBody, {"prompt": "x", "truncation_side": "left"}, "truncation_side", ""),
        (CompletionBody, {"prompt": "x", "return_perf_metrics": True}, "return_perf_metrics", "library"),
        (CompletionBody, {"prompt": "x", "max_new_tokens": 3}, "max_new_tokens", "max_tokens"),
        (CompletionBody, {"prompt": "x", "request_id": "a"}, "request_id", "X-Request-Id"),
        (ChatBody, {"messages": [USER], "echo": True}, "echo", "except as false"),
        (GenerateBody, {"text": "x", "json_schema": "{}"}, "json_schema", "sampling_params.json_schema"),
        (CompletionBody, {"prompt": "x", "tools": [{}]}, "tools", "not supported"),
        (GenerateBody, {"text": "x", "temperature": 0}, "temperature", "sampling_params.temperature"),
        (
            GenerateBody,
            {"text": "x", "sampling_params": {"stream_interval": 4}},
            "sampling_params.stream_interval",
            "--stream-interval",
        ),
        (
            GenerateBody,
            {"text": "x", "sampling_params": {"seed": 1}},
            "sampling_params.seed",
            "sampling_seed",
        ),
        (ChatBody, chat(content=[{"type": "image_url"}]), "messages[1].content[0].type", "text only"),
        (ChatBody, chat(function_call={"name": "f"}), "messages[1].function_call", "tool_calls"),
        (ChatBody, chat(content=[{"image": "x"}]), "messages[1].content[0].image", "text only"),
    ],
)
def test_what_changes_the_answer_and_is_not_built_is_refused_by_name(
    kind: Any, body: dict[str, Any], param: str, part: str, policy: Any
) -> None:
    error = refusal(kind, policy, **body)
    assert error.param == param
    assert part in error.message


def check_is_known(name: str) -> None:
    """Fail where a part of a request by this name is neither read nor refused by its name."""
    without_effect = {"arrival_time", "label", "pad_id"}
    for kind, body in BODIES.items():
        if name not in kind.__struct_fields__ and name not in without_effect:
            assert refusal(kind, **body, **{name: {"odd": [1]}}).param == name
    if name not in GenerateSampling.__struct_fields__ and name not in without_effect:
        error = refusal(GenerateBody, text="x", sampling_params={name: {"odd": [1]}})
        assert error.param == f"sampling_params.{name}"


def test_what_the_client_library_takes_is_refused_where_it_has_no_effect() -> None:
    for name in SamplingParams.__struct_fields__:
        check_is_known(name)


# Each alone, so that none is lost from the tables unnoticed.
REFUSED_VALUES: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "beam_width": 2,
    "bootstrap_host": "h",
    "chat_template": "{{ messages }}",
    "detokenize": False,
    "disaggregated_params": {"request_type": "context_only"},
    "documents": [{"text": "x"}],
    "early_stopping": True,
    "ebnf": "root ::= x",
    "embedding_bias": [0.5],
    "end_id": 2,
    "extra_key": "k",
    "functions": [{"name": "f"}],
    "guided_choice": ["a", "b"],
    "guided_decoding_backend": "xgrammar",
    "guided_grammar": "root ::= x",
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "json_schema": "{}",
    "kv_transfer_params": {"do_remote_decode": True},
    "length_penalty": 2.0,
    "logits_processors": ["p"],
    "lora_path": "a",
    "max_output_tokens": 5,
    "min_length": 5,
    "models": ["a", "b"],
    "plugins": [{"id": "web"}],
    "transforms": ["middle-out"],
    "usage": {"include": True},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "random_seed": 7,
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "regex": "a+",
    "response_format": {"type": "json_object"},
    "return_perf_metrics": True,
    "session_params": {"id": "s"},
    "stop_regex": "a+",
    "structured_outputs": {"regex": "a+"},
    "suffix": "x",
    "tool_choice": "required",
    "tools": [{"type": "function"}],
    "use_beam_search": True,
    "web_search_options": {"search_context_size": "low"},
}
REFUSED_WORDS = """
    add_special_tokens additional_model_outputs allotted_time_ms apply_batched_logits_processor audio_data
    background bad bad_token_ids bad_words_list best_of
    bootstrap_pair_key bootstrap_port bootstrap_room client_id custom_logit_processor custom_params
    data_parallel_rank decode_tp_size disagg_prefill_dp_rank ec_transfer_params echo encoder_urls
    exclude_input_from_output external_draft_tokens_config flat_logprobs function_call guided_decoding
    guided_decoding_params guided_whitespace_pattern http_worker_ipc image_data image_max_dynamic_patch
    images_config input_embeds kv_router_hint len_penalty log_metrics
    logits_post_processor_name logits_processor
    logprob_token_ids lookahead_config lora_config lora_id lora_request lora_task_id max_dynamic_patch
    max_thinking_tokens media_io_kwargs min_dynamic_patch mm_content_hashes mm_hashes mm_processor_kwargs
    moderation multi_item_delimiter_indices multimodal_params need_wait_for_mm_inputs ngram_corpus_id
    no_stop_trim num_items_assigned positional_embed_overrides prompt_adapter_request prompt_embedding_table
    prompt_embeds prompt_ignore_length
    prompt_logprobs_start prompt_token_ids prompt_tuning_config query_token_ids
    repetition_detection request_id request_output_len require_reasoning return_all_generated_tokens
    return_bytes return_cached_tokens_details return_context_logits return_encoder_output return_entropy
    return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 return_generation_logits
    return_indexer_topk return_log_probs return_prompt_text return_prompt_token_ids return_routed_experts
    return_sampling_mask rid routed_dp_rank routed_experts_start_len runtime_top_k runtime_top_p
    spaces_between_special_tokens stop_words_list streaming thinking_token_budget
    token_ids_logprob truncate_prompt_tokens truncation_side use_audio_in_video video_config video_data
    video_max_dynamic_patch vllm_xargs watermarking
"""
REFUSED_NAMES = REFUSED_WORDS.split()
TAKEN_VALUES: dict[str, Any] = {
    "arrival_time": 1.5,
    "conversation_id": "c",
    "custom_labels": {"a": "b"},
    "external_trace_header": {"a": "b"},
    "include_reasoning": True,
    "label": "a",
    "metadata": {"a": "b"},
    "no_logs": True,
    "pad_id": 0,
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "provider": {"order": ["a"]},
    "received_time": 1.5,
    "route": "fallback",
    "routing_key": "r",
    "safety_identifier": "s",
    "separate_reasoning": True,
    "service_tier": "auto",
    "session_id": "s",
    "store": True,
    "stream_reasoning": False,
    "user": "u",
    "verbosity": "low",
}


def test_each_field_that_is_not_built_is_refused() -> None:
    for name in (*REFUSED_VALUES, *REFUSED_NAMES):
        for kind, body in BODIES.items():
            if name in kind.__struct_fields__:
                continue
            error = refusal(kind, "refuse", **body, **{name: REFUSED_VALUES.get(name, {"odd": [1]})})
            assert (error.param, error.code) == (name, "unsupported_parameter")


def test_each_field_without_effect_is_taken_in_its_type_alone() -> None:
    for name, value in TAKEN_VALUES.items():
        for kind, body in BODIES.items():
            assert read(kind, "refuse", **body, **{name: value})[1] == [], name
            assert refusal(kind, **body, **{name: [value]}).param == name


def test_the_lists_above_are_complete() -> None:
    assert {*REFUSED_VALUES, *REFUSED_NAMES} == REFUSED.keys()
    assert TAKEN_VALUES.keys() == TAKEN.keys()


@for_each("policy", ["warn", "refuse"])
@for_each(
    ("given", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("topP", "top_p"),
        ("stops", "stop"),
        ("strem", "stream"),
        ("response_fromat", "response_format"),
        ("top_a", None),
        ("enable_thinking", None),
        ("x" * 5000, None),
    ],
)
def test_a_misspelling_is_refused_with_the_right_name(given: str, meant: str | None, policy: Any) -> None:
    assert nearest(given, (*ChatBody.__struct_fields__, *REFUSED)) == meant
    if meant is not None:
        assert f"did you mean {meant}?" in refusal(ChatBody, policy, messages=[USER], **{given: 1}).message
        assert read(ChatBody, "ignore", messages=[USER], **{given: 1})[1] == []


@for_each(
    ("kind", "given", "meant"),
    [
        (CompletionBody, "max_completion_token", "max_completion_tokens"),
        (CompletionBody, "max_new_token", "max_new_tokens"),
        (GenerateBody, "max_token", "max_tokens"),
        (GenerateBody, "temprature", "temperature"),
    ],
)
def test_a_misspelt_field_of_another_endpoint_is_refused(kind: Any, given: str, meant: str) -> None:
    assert f"did you mean {meant}?" in refusal(kind, **BODIES[kind], **{given: 1}).message


def test_no_field_of_the_peers_is_taken_for_another() -> None:
    """Each is looked up in the tables before it is compared with their names."""
    for name in (*REFUSED, *TAKEN):
        for kind, body in BODIES.items():
            if name in kind.__struct_fields__:
                continue
            data = json.dumps({**body, name: {"odd": [1]}}).encode()
            assert outcome(kind, data, "refuse") != ("unknown_parameter", name)
    for table in FIELD_TABLES.values():
        assert not table.taken.keys() & table.refused.keys()


def test_the_types_of_a_body_are_inspected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the first body with an unknown field held up the event loop for 17 ms."""
    inspect = Mock(wraps=msgspec.inspect.type_info)
    monkeypatch.setattr(msgspec.inspect, "type_info", inspect)
    for each in vars(unknown_fields).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()
    for body in ({"no": "such field"}, {"max_tokens": 1.0}, {"response_format": {"type": "other"}}):
        outcome(ChatBody, json.dumps({"messages": [USER], **body}).encode(), "warn")
    inspected = [call.args[0] for call in inspect.call_args_list]
    assert ChatBody in inspected
    assert len(inspected) == len(set(inspected)), inspected


def test_what_is_bad_input_is_so_under_each_policy() -> None:
    """Beside what is unknown; the cases themselves are held against a server that warns."""
    num_held = 0
    for case in HTTP_CASES:
        kind = KINDS.get(case.path)
        if kind is None or case.status != 400 or len(data := case.content()) > SMALL_BODY_BYTES:
            continue
        num_held += 1
        warned, refused = (outcome(kind, data, policy) for policy in ("warn", "refuse"))
        if case.part != "256":
            assert warned == refused, case.id
        if case.code in ("unknown_parameter", "unsupported_parameter"):
            assert refused == (case.code, case.param), case.id
    assert num_held > len(HTTP_CASES) // 2


def outcome(kind: Any, data: bytes, policy: Any) -> tuple[str | None, str | None]:
    try:
        decoded(data, kind, FieldFilter(policy, no_wait))
    except InvalidRequest as error:
        return error.code, error.param
    return None, None


def test_names_are_escaped_and_few() -> None:
    names = ["a,b", "c\r\nd", "é", "x" * 100, *(f"odd{number}{'z' * number}" for number in range(20))]
    _, ignored = read(CompletionBody, prompt="x", **dict.fromkeys(names, 1))
    assert len(ignored) == 16
    assert ignored[:4] == ["a\\u002cb", "c\\u000d\\u000ad", "\\u00e9", "x" * 64]
    assert all(name.isascii() and name.isprintable() and "," not in name for name in ignored)
    assert read(CompletionBody, prompt="x", **{"\U0001f600": 1, "": 1, "b" * 63 + "\n": 1})[1] == [
        "\\ud83d\\ude00",
        "\\u0022\\u0022",
        "b" * 63,
    ]
    assert refusal(CompletionBody, "refuse", prompt="x", **{"": 1}).param == '""'
    many = {f"odd{number}": 1 for number in range(MAX_UNKNOWN + 1)}
    with pytest.raises(InvalidRequest, match="unknown fields"):
        read(CompletionBody, prompt="x", **many)


@pytest.mark.parametrize("size", [SMALL_BODY_BYTES, 4 * SMALL_BODY_BYTES], ids=["small", "large"])
def test_few_objects_are_looked_through_for_them(size: int) -> None:
    """A body of 128 KiB that is full of empty objects had taken a tenth of a second."""
    parts: list[dict[str, Any]] = [{}] * (size // 5)
    error = refusal(ChatBody, odd=1, messages=[{"role": "u", "odd": 1, "content": parts}])
    assert (error.param or "").startswith("messages")


def test_the_log_says_each_name_once(caplog: pytest.LogCaptureFixture) -> None:
    log = IgnoredLog()
    with caplog.at_level(logging.WARNING):
        log.note("/v1/completions", ["odd"])
        log.note("/v1/completions", ["odd"])
        log.note("/v1/completions", ["odd", "odder"])
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "/v1/completions: unknown fields are ignored: odd",
        "/v1/completions: unknown fields are ignored: odder",
    ]


def test_the_log_says_when_it_falls_silent(caplog: pytest.LogCaptureFixture) -> None:
    log = IgnoredLog()
    with caplog.at_level(logging.WARNING):
        for number in range(MAX_LOGGED + 9):
            log.note("/v1/completions", [f"odd{number}"])
    assert len(caplog.records) == MAX_LOGGED + 1
    assert (
        caplog.records[-1].getMessage() == f"{MAX_LOGGED} unknown fields have been told; further ones are not"
    )


def test_the_history_of_an_agent_reaches_the_template() -> None:
    calls = [
        {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"function": {"name": "g", "arguments": {"b": [2]}}, "odd": 1},
    ]
    body, ignored = read(
        ChatBody,
        messages=[
            {"role": "my-own-role", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
        ],
    )
    assert ignored == ["messages.tool_calls.odd"]
    assert conversation(body.messages) == [
        {"role": "my-own-role", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "id": "c1"},
                {"type": "function", "function": {"name": "g", "arguments": {"b": [2]}}},
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c1"},
    ]


@for_each("role", ["user", "system", "developer", "tool", "my-own-role"])
@for_each("fields", [{}, {"content": None}, {"text": "hi"}])
def test_a_message_without_content_is_refused(role: str, fields: dict[str, Any]) -> None:
    body, _ = read(ChatBody, messages=[{"role": "assistant"}, {"role": role, **fields}])
    with pytest.raises(InvalidRequest, match="content is missing") as caught:
        conversation(body.messages)
    assert caught.value.param == "messages[1].content"


def test_arguments_that_are_nested_too_deeply_are_refused_in_plain_words() -> None:
    call = '{"function": {"name": "f", "arguments": {"a": %s}}}' % ("[" * 20_000 + "]" * 20_000)
    data = f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}'.encode()
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        decoded(data, ChatBody, FieldFilter("warn", no_wait))


@pytest.mark.parametrize("padding", [0, SMALL_BODY_BYTES], ids=["small", "large"])
def test_the_history_of_an_agent_may_be_large(padding: int) -> None:
    """Tool calls above 64 KiB were served in a small body alone."""
    arguments = {"text": '"\u00e9\n' * 15_000 + "x" * padding}
    call = {"function": {"name": "f", "arguments": json.dumps(arguments)}, "odd": 1}
    own = {"role": "assistant", "content": "y", "tool_calls": [call]}
    thought = {"role": "assistant", "reasoning_content": "\u00e9" + "z" * (70_000 + padding), "odd": 1}
    for given, name in ((own, "tool_calls"), (thought, "reasoning_content")):
        messages = [USER, given]
        body, ignored = read(ChatBody, messages=messages)
        (_, turn) = conversation(body.messages)
        assert len(ignored) == 1
        if name == "tool_calls":
            assert turn[name][0]["function"] == {"name": "f", "arguments": json.dumps(arguments)}
            assert turn["content"] == "y"
        else:
            assert turn[name] == given[name]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "tool_calls"])
def test_more_history_than_a_message_may_have_is_refused_with_the_number(name: str) -> None:
    value: Any = "x" * (1 << 20)
    if name == "tool_calls":
        value = [{"function": {"name": "f", "arguments": value}}]
    error = refusal(ChatBody, messages=[USER, {"role": "assistant", name: value}])
    assert error.param == f"messages[1].{name}"
    assert error.message == f"messages[1].{name} has more than {1 << 20} bytes"


def test_calls_of_tools_have_a_bound() -> None:
    nested = msgspec.Raw(b"[" * 10 + b"]" * 10)
    arguments = {"a": [nested] * 20_000}
    call = {"function": {"name": "f", "arguments": msgspec.json.decode(msgspec.json.encode(arguments))}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    body = msgspec.json.decode(msgspec.json.encode({"messages": messages}), type=ChatBody)
    with pytest.raises(InvalidRequest, match="brackets"):
        conversation(body.messages)
