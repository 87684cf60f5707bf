"""The OpenAI endpoints over a fake ring: every field has its effect or is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carousel.server.openai.types import CompletionBody
from carousel.server.request.sampling import sampling_params
from runtime.checkpoint.checkpoint_config import SamplingDefaults
from runtime.wire.sampling_params import SamplingParams
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import spell


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), spell("abc")) as front:
        yield front


def sampling_of(front: Front, **body: Any) -> SamplingParams:
    response = front.complete(**body)
    assert response.status_code == 200, response.text
    return front.ring.requests[-1].sampling


@pytest.mark.parametrize(
    ("field", "value", "wire"),
    [
        ("max_tokens", 7, 7),
        ("temperature", 0, 0.0),
        ("temperature", 0.5, 0.5),
        ("top_p", 0.25, 0.25),
        ("top_k", 5, 5),
        ("min_p", 0.5, 0.5),
        ("top_n_sigma", 1.5, 1.5),
        ("repetition_penalty", 1.5, 1.5),
        ("presence_penalty", -1, -1.0),
        ("frequency_penalty", 2, 2.0),
        ("min_tokens", 3, 3),
        ("stop", "a", ("a",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop_token_ids", [4], (4,)),
        ("ignore_eos", True, True),
        ("skip_special_tokens", False, False),
        ("include_stop_str_in_output", True, True),
        ("seed", 5, 5),
        ("seed", -5, (1 << 63) - 5),
        ("seed", -(1 << 63), 0),
        ("logit_bias", {"9": -100}, ((9, -100.0),)),
        ("logprobs", 0, 0),
        ("logprobs", False, None),
        ("no_repeat_ngram_size", 3, 3),
        ("top_p_decay", 0.5, 0.5),
        ("top_p_min", 0.25, 0.25),
        ("top_p_reset_ids", [4], (4,)),
        ("stop_words_ids", [[4, 5]], ((4, 5),)),
        ("bad_words_ids", [[4], [5, 6]], ((4,), (5, 6))),
        ("truncate_prompt_tokens", 7, 7),
        ("truncate_prompt_tokens", -1, -1),
    ],
)
def test_a_sampling_field_reaches_the_wire(front: Front, field: str, value: Any, wire: Any) -> None:
    assert getattr(sampling_of(front, **{field: value}), field) == wire


@pytest.mark.parametrize(
    ("field", "value"), [("priority", 5), ("cache_salt", "mine"), ("add_special_tokens", False)]
)
def test_an_option_of_the_request_reaches_the_wire(front: Front, field: str, value: Any) -> None:
    assert front.complete(**{field: value}).status_code == 200
    assert getattr(front.ring.requests[-1], field) == value


def test_limits_default_to_those_of_openai(front: Front) -> None:
    assert sampling_of(front).max_tokens == 16
    assert front.chat().status_code == 200
    chat = front.ring.requests[-1]
    assert chat.sampling.max_tokens == 64  # the context length; the scheduler cuts it to what is left
    assert chat.add_generation_prompt


def test_limits_default_to_the_operator_s_then_to_the_model_s(tmp_path: Path) -> None:
    """The demo model's generation_config.json says 1,024 new tokens, for chat alone."""
    with http_front(tmp_path, spell("abc"), context_length=2048) as front:
        assert sampling_of(front).max_tokens == 16
        for fields, wanted in [({}, 1024), ({"min_tokens": 1500}, 1500), ({"max_tokens": 9}, 9)]:
            assert front.chat(**fields).status_code == 200
            assert front.ring.requests[-1].sampling.max_tokens == wanted
    with http_front(tmp_path, spell("abc"), context_length=2048, default_max_tokens=5) as front:
        assert sampling_of(front).max_tokens == 5
        assert sampling_of(front, max_tokens=6).max_tokens == 6
        assert front.chat().status_code == 200
        assert front.post("/generate", text="x").status_code == 200
        assert [each.sampling.max_tokens for each in front.ring.requests[-2:]] == [5, 5]
        refused = front.complete(min_tokens=10).json()["error"]
        assert refused["param"] == "min_tokens"
        assert refused["message"].endswith(
            "more than the 5 tokens that this server generates where max_tokens is left out; set max_tokens"
        )
        refused = front.post("/generate", text="x", sampling_params={"min_new_tokens": 10}).json()["error"]
        assert refused["param"] == "sampling_params.min_new_tokens"
        assert "set max_new_tokens" in refused["message"]
        both = {"min_new_tokens": 10, "max_new_tokens": 3}
        refused = front.post("/generate", text="x", sampling_params=both).json()["error"]
        assert refused["message"] == (
            "sampling_params.min_new_tokens is 10, more than sampling_params.max_new_tokens, which is 3"
        )
        assert front.chat(min_tokens=10).status_code == 200
        assert front.ring.requests[-1].sampling.max_tokens == 10


def test_the_models_own_defaults_come_before_those_of_openai_and_after_the_callers() -> None:
    recommended = SamplingDefaults(temperature=0.25, top_k=20)

    def sampling(defaults: SamplingDefaults, **fields: Any) -> tuple[float, int, float]:
        body = CompletionBody(prompt="x", **fields)
        result = sampling_params(body, defaults, max_tokens=1, logprobs=None, prompt_logprobs=None)
        return result.temperature, result.top_k, result.top_p

    assert sampling(SamplingDefaults()) == (1.0, -1, 1.0)
    assert sampling(recommended) == (0.25, 20, 1.0)
    assert sampling(recommended, temperature=1.5) == (1.5, 20, 1.0)


@pytest.mark.parametrize(("defaults", "temperature"), [("model", 0.7), ("openai", 1.0)])
def test_a_launch_may_leave_the_models_own_defaults_out(
    tmp_path: Path, defaults: str, temperature: float
) -> None:
    with http_front(tmp_path, spell("abc"), sampling_defaults=defaults) as front:
        assert sampling_of(front).temperature == temperature
        assert sampling_of(front, temperature=0.25).temperature == 0.25


def test_both_spellings_of_the_token_limit_work_in_chat(front: Front) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        assert front.chat(**{name: 9}).status_code == 200
        assert front.ring.requests[-1].sampling.max_tokens == 9
    response = front.chat(max_tokens=1, max_completion_tokens=2)
    assert response.json()["error"]["param"] == "max_completion_tokens"


def test_messages_reach_the_wire_as_text_with_developer_as_system(front: Front) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "n",
        },
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        {"role": "tool", "content": "t"},
    ]
    assert front.chat(messages=messages).status_code == 200
    wire = front.ring.requests[-1].messages
    assert wire is not None
    assert [(each.role, each.content, each.name) for each in wire] == [
        ("system", "be brief", ""),
        ("user", "a\nb", "n"),
        ("assistant", "", ""),
        ("tool", "t", ""),
    ]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_content_may_be_parts_in_every_role(front: Front, role: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "x"}}]
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": parts}]
    for content in (parts, "a\nb"):
        messages[1] = {"role": role, "content": content}
        assert front.chat(messages=messages).status_code == 200
    in_parts, as_text = (request.messages for request in front.ring.requests[-2:])
    assert in_parts == as_text
    assert as_text is not None
    assert as_text[1].content == "a\nb"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "refusal", "refusal": "no"},
        {"type": "input_text", "text": "x"},
        {"type": "tool_result", "content": "x"},
    ],
    ids=lambda part: part["type"],
)
def test_a_part_that_is_no_text_is_refused_by_its_type(front: Front, role: str, part: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "a"}, part]
    response = front.chat(messages=[{"role": "user", "content": "x"}, {"role": role, "content": parts}])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[1].content[1].type"
    assert "text only" in error["message"]


NEUTRAL_COMMON = {
    "n": 1,
    "user": "me",
    "metadata": {},
    "store": False,
    "service_tier": "auto",
    "prompt_cache_key": None,
    "safety_identifier": "me",
    "stream_options": None,
    "seed": None,
    "stop": None,
    "logit_bias": {},
    "top_k": None,
}


def test_neutral_values_are_accepted(front: Front) -> None:
    response = front.complete(**NEUTRAL_COMMON, best_of=1, echo=False, suffix=None, logprobs=None)
    assert response.status_code == 200, response.text
    response = front.chat(
        **NEUTRAL_COMMON,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        logprobs=False,
        top_logprobs=None,
        audio=None,
        functions=None,
    )
    assert response.status_code == 200, response.text


def test_prompts_without_a_seed_draw_each_their_own(front: Front) -> None:
    seen = len(front.ring.requests)
    assert front.complete(prompt=["same", "same"]).status_code == 200
    assert front.complete(prompt=["same", "same"], seed=5).status_code == 200
    seeds = [request.sampling.seed for request in front.ring.requests[seen:]]
    assert seeds[0] != seeds[1]  # equal by chance once in 2**63 runs
    assert seeds[2:] == [5, 5]
    assert front.complete(prompt=["same", "same"], seed=-1).status_code == 200
    assert len({request.sampling.seed for request in front.ring.requests[seen + 4 :]}) == 2


def test_a_label_field_says_what_it_accepts(front: Front) -> None:
    message = front.complete(user=3).json()["error"]["message"]
    assert message == "user: Expected `str`, got `int`"


def refused_field(response: Any) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[-1].split("[")[0] in error["message"]
    return str(error["param"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 129),
        ("best_of", 129),
        ("no_repeat_ngram_size", 65),
        ("top_p_decay", 0),
        ("top_p_min", 2),
        ("top_p_reset_ids", [-1]),
        ("stop_words_ids", [[]]),
        ("bad_words_ids", [3]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", "all"),
        ("echo", "yes"),
        ("suffix", "x"),
        ("store", "yes"),
        ("metadata", "a"),
        ("service_tier", 1),
        ("max_token", 5),
        ("temprature", 0.5),
        ("user", 3),
        ("structural_tag", "{}"),
        ("guided_regex", ""),
        ("guided_regex", 3),
        ("stream_options", {"include_usage": True}),
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", 1e308),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("top_n_sigma", -1),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 1 << 63),
        ("min_tokens", 17),
        ("seed", -(1 << 63) - 1),
        ("seed", 1 << 63),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 257]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": "x"}),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("priority", 1001),
        ("cache_salt", "x" * 257),
        ("cache_salt", ""),
        ("stream", "yes"),
        ("prompt", []),
        ("prompt", None),
        ("prompt", [1, "a"]),
        ("prompt", ["a", [1]]),
        ("prompt", [-1]),
        ("prompt", [True]),
        ("prompt", [[]]),
        ("prompt", ["a"] * 1025),
    ],
)
def test_a_completion_field_that_is_wrong_or_not_built_is_refused_by_name(
    front: Front, field: str, value: Any
) -> None:
    seen = len(front.ring.requests)
    refused = refused_field(front.complete(**{field: value}))
    assert refused.replace("[", ".").partition(".")[0] == field
    assert "..." not in refused
    assert len(front.ring.requests) == seen


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tools", [{"type": "function"}], "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("response_format", {"type": "structural_tag"}, "response_format"),
        ("response_format", {"type": "json_schema"}, "response_format"),
        ("response_format", {"type": "yaml"}, "response_format.type"),
        ("response_format", {"type": "text", "schema": {}}, "response_format.schema"),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ("structured_outputs", {"regex": ""}, "structured_outputs"),
        ("modalities", ["audio"], "modalities"),
        ("prompt", "x", "prompt"),
        ("top_logprobs", 3, "top_logprobs"),
        ("top_logprobs", 21, "top_logprobs"),
        ("top_logprobs", -1, "top_logprobs"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", [{"role": "user", "content": "x"}] * 4097, "messages"),
        ("messages", [{"role": "", "content": "x"}], "messages[0].role"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user", "contents": "x"}], "messages[0].contents"),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[0].content[0].type",
        ),
    ],
)
def test_a_chat_field_that_is_wrong_or_not_built_is_refused_by_name(
    front: Front, field: str, value: Any, param: str
) -> None:
    assert refused_field(front.chat(**{field: value})) == param


def test_a_missing_field_is_named(front: Front) -> None:
    assert refused_field(front.post("/v1/completions")) == "prompt"
    assert refused_field(front.post("/v1/chat/completions")) == "messages"


# -- what strangers' clients send ----------------------------------------------------------------------------


def test_unknown_fields_are_named_in_a_header(front: Front) -> None:
    for stream in (False, True):
        response = front.complete(odd=1, **{"a,\r\nb": 2}, stream=stream)
        assert response.status_code == 200
        assert response.headers["x-carousel-ignored"] == "odd,a\\u002c\\u000d\\u000ab"
    response = front.chat(messages=[{"role": "user", "content": "x", "extra_field": 1}], user="u", store=True)
    assert response.headers["x-carousel-ignored"] == "messages.extra_field"
    assert "x-carousel-ignored" not in front.complete(user="u", odd=None).headers
    assert front.complete(odd=1, logit_bias={"a": 1}).headers["x-carousel-ignored"] == "odd"


def test_the_history_of_an_agent_is_taken(front: Front) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        {"role": "my-custom-role", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    assert front.chat(messages=history).status_code == 200
    role, assistant, tool = front.ring.requests[-1].messages or ()
    assert role.role == "my-custom-role"
    assert msgspec.msgpack.decode(assistant.further) == {
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "id": "c1"}]
    }
    assert msgspec.msgpack.decode(tool.further) == {"tool_call_id": "c1"}


def test_the_model_that_clients_send_where_none_is_set_is_the_one_there_is(front: Front) -> None:
    for unset in ("default", ""):
        assert front.complete(model=unset).json()["model"] == "fake"
    (card,) = front.http.get("/v1/models").json()["data"]
    assert (card["root"], card["parent"]) == ("fake", None)


def test_a_batch_of_a_thousand_prompts(front: Front) -> None:
    response = front.complete(prompt=["x"] * 1024, max_tokens=1)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 1024
