"""/generate over a fake ring: SGLang's spellings of what is asked and answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from runtime.wire.retention import RetainedRange, Retention
from tests.harness.http.http_front import Front, events, http_front
from tests.harness.ring.fake_ring import VERSION, failure, finish, output, spell


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    if request.text == "refuse":
        return [failure(request, "context_length_exceeded", 400, "text")]
    if request.text == "long":
        return [output(request, "ab", finish=finish("length", 2))]
    if request.text == "end":
        return [output(request, "a", finish=finish("abort"))]
    if request.sampling.stop:
        return [output(request, "ab", finish=finish("stop", matched=request.sampling.stop[0]))]
    if request.sampling.logprobs is None:
        return spell(request.text or "abc")(request)
    return [
        SequenceOutput(
            request.handle,
            "in",
            pack_ids([67, 68]),
            np.array([-0.5, -1.0], np.float32).tobytes(),
            pack_ids([67, 7, 68, 8]) if request.sampling.logprobs else b"",
            np.array([-0.5, -2.0, -1.0, -3.0], np.float32).tobytes() if request.sampling.logprobs else b"",
            finish("stop", 2),
        )
    ]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), answer) as front:
        yield front


def ask(front: Front, **body: Any) -> httpx.Response:
    if "text" not in body and "input_ids" not in body:
        body["text"] = "abc"
    return front.post("/generate", **body)


def without_latency(body: dict[str, Any]) -> dict[str, Any]:
    assert 0 < body["meta_info"].pop("e2e_latency") < 10
    return body


def test_an_answer_has_the_shape_of_sglang(front: Front) -> None:
    body = without_latency(ask(front, rid="mine").json())
    assert body == {
        "text": "abc",
        "output_ids": [97, 98, 99],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": None},
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "weight_version": VERSION,
        },
    }
    assert front.ring.requests[-1].label == "mine"


def test_the_id_is_that_of_the_request_unless_the_body_has_one(front: Front) -> None:
    response = ask(front)
    assert response.json()["meta_info"]["id"] == response.headers["x-request-id"]


def test_a_list_is_answered_by_a_list_in_its_order(front: Front) -> None:
    assert [each["text"] for each in ask(front, text=["one", "two"]).json()] == ["one", "two"]
    (only,) = ask(front, text=["one"]).json()
    assert "index" not in only


def test_token_ids_reach_the_wire(front: Front) -> None:
    assert ask(front, input_ids=[5, 6]).json()["text"] == "abc"
    assert unpack_ids(front.ring.requests[-1].input_ids or b"").tolist() == [5, 6]
    assert len(ask(front, input_ids=[[5, 6], [7]]).json()) == 2


def test_a_stream_repeats_what_came_before(front: Front) -> None:
    *parts, done = events(ask(front, text="abcdef", stream=True))
    assert done == "[DONE]"
    for part in parts:
        assert "abcdef".startswith(part["text"])
        assert part["output_ids"] == [ord(character) for character in part["text"]]
        assert "index" not in part
    lengths = [part["meta_info"]["completion_tokens"] for part in parts]
    assert lengths == sorted(lengths)
    assert all(part["meta_info"]["finish_reason"] is None for part in parts[:-1])
    last = without_latency(parts[-1])
    assert last["text"] == "abcdef"
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    assert last["meta_info"]["prompt_tokens"] == 5
    assert last["meta_info"]["completion_tokens"] == 6


def test_a_rid_that_is_there_twice_is_refused_as_that(front: Front) -> None:
    answer = ask(front, text=["x", "y", "z"], rid=["a", "b", "a"])
    assert answer.json()["error"]["message"] == "rid: 'a' is there twice; each prompt needs its own"


def test_a_stream_over_a_list_names_the_prompt_of_each_event(front: Front) -> None:
    *parts, _ = events(ask(front, text=["one", "two"], stream=True))
    final = {part["index"]: part["text"] for part in parts if part["meta_info"]["finish_reason"]}
    assert final == {0: "one", 1: "two"}


def test_reasons_of_the_end(front: Front) -> None:
    def reason(**body: Any) -> Any:
        return ask(front, **body).json()["meta_info"]["finish_reason"]

    assert reason(sampling_params={"stop": "c"}) == {"type": "stop", "matched": "c"}
    assert reason(text="long") == {"type": "length", "length": 2}
    assert ask(front, text="end").json()["error"]["code"] == "aborted"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_triples(front: Front, stream: bool) -> None:
    def meta(**body: Any) -> Any:
        response = ask(front, return_logprob=True, stream=stream, **body)
        return (events(response)[0] if stream else response.json())["meta_info"]

    plain = meta()
    assert plain["input_token_logprobs"] == []
    assert plain["output_token_logprobs"] == [[-0.5, 67, None], [-1.0, 68, None]]
    assert "output_top_logprobs" not in plain
    top = meta(top_logprobs_num=2, logprob_start_len=-1)
    assert top["output_top_logprobs"] == [
        [[-0.5, 67, None], [-2.0, 7, None]],
        [[-1.0, 68, None], [-3.0, 8, None]],
    ]
    shown = meta(return_text_in_logprobs=True)
    assert all(isinstance(text, str) for _, _, text in shown["output_token_logprobs"])


@pytest.mark.parametrize(
    ("field", "value", "wire_field", "wire_value"),
    [
        ("max_new_tokens", 7, "max_tokens", 7),
        ("min_new_tokens", 3, "min_tokens", 3),
        ("sampling_seed", 5, "seed", 5),
        ("no_stop_trim", True, "include_stop_str_in_output", True),
        ("temperature", 0.5, "temperature", 0.5),
        ("top_p", 0.5, "top_p", 0.5),
        ("top_k", 5, "top_k", 5),
        ("min_p", 0.5, "min_p", 0.5),
        ("top_n_sigma", 1.5, "top_n_sigma", 1.5),
        ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
        ("presence_penalty", 1.5, "presence_penalty", 1.5),
        ("frequency_penalty", 1.5, "frequency_penalty", 1.5),
        ("stop", ["x", "y"], "stop", ("x", "y")),
        ("stop_token_ids", [3], "stop_token_ids", (3,)),
        ("ignore_eos", True, "ignore_eos", True),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("logit_bias", {"3": 1.5}, "logit_bias", ((3, 1.5),)),
        ("no_repeat_ngram_size", 3, "no_repeat_ngram_size", 3),
        ("top_p_decay", 0.5, "top_p_decay", 0.5),
        ("top_p_min", 0.25, "top_p_min", 0.25),
        ("top_p_reset_ids", [4], "top_p_reset_ids", (4,)),
        ("stop_words_ids", [[4, 5]], "stop_words_ids", ((4, 5),)),
        ("bad_words", ["x"], "bad_words", ("x",)),
        ("bad_words_ids", [[4]], "bad_words_ids", ((4,),)),
        ("allowed_token_ids", [4], "allowed_token_ids", (4,)),
        ("truncate_prompt_tokens", 3, "truncate_prompt_tokens", 3),
    ],
)
def test_a_sampling_parameter_reaches_the_wire(
    front: Front, field: str, value: Any, wire_field: str, wire_value: Any
) -> None:
    assert ask(front, sampling_params={field: value}).status_code == 200
    assert getattr(front.ring.requests[-1].sampling, wire_field) == wire_value


def test_defaults_are_those_of_sglang(front: Front) -> None:
    assert ask(front).status_code == 200
    assert front.ring.requests[-1].sampling.max_tokens == 128
    assert ask(front, priority=3, cache_salt="s").status_code == 200
    assert (front.ring.requests[-1].priority, front.ring.requests[-1].cache_salt) == (3, "s")


def test_how_firmly_its_kv_is_kept_reaches_the_wire_from_every_endpoint(front: Front) -> None:
    ranges = [{"token_start": 0, "token_end": 9, "priority": 90, "duration_ms": 500}, {"token_start": 9}]
    config = {"token_range_retention_configs": ranges, "decode_retention_priority": 10}
    expected = Retention((RetainedRange(0, 9, 90, 500), RetainedRange(9, None, 35)), 10)
    for response in (
        ask(front, kv_cache_retention_config=config),
        front.complete(kv_cache_retention_config=config),
        front.chat(kv_cache_retention_config=config),
    ):
        assert response.status_code == 200, response.text
        assert front.ring.requests[-1].retention == expected
    assert ask(front, kv_cache_retention_config={"max_tokens": 7}).status_code == 200
    assert front.ring.requests[-1].retention == Retention((RetainedRange(0, 7, 100),))
    overlapping = {"token_range_retention_configs": [{"token_start": 0, "token_end": 9}, {"token_start": 8}]}
    for wrong in (overlapping, {"decode_retention_priority": 101}, {"max_tokens": 7, **config}, 3):
        for each in (ask, Front.complete, Front.chat):
            error = each(front, kv_cache_retention_config=wrong).json()["error"]
            assert error["param"].startswith("kv_cache_retention_config")
    odd = ask(front, kv_cache_retention_config={"token_range_retention_configs": [{**ranges[0], "odd": 1}]})
    assert odd.headers["x-carousel-ignored"] == (
        "kv_cache_retention_config.token_range_retention_configs.odd"
    )


def test_the_bodies_that_benchmark_clients_send_are_accepted(front: Front) -> None:
    body = {
        "text": "abc",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        "image_data": None,
    }
    assert events(front.post("/generate", **body))[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": None}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"text": ["x"] * 1025}, "text"),
        ({"text": "refuse"}, "text"),
        ({"max_new_tokens": 1}, "max_new_tokens"),
        ({"rid": "x" * 257}, "rid"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"rid": ["a"]}, "rid"),
        ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid"),
        ({"image_data": ["x"]}, "image_data"),
        ({"lora_path": "x"}, "lora_path"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"top_logprobs_num": 2}, "top_logprobs_num"),
        ({"return_text_in_logprobs": True}, "return_text_in_logprobs"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"return_logprob": [True]}, "return_logprob"),
        ({"priority": 1001}, "priority"),
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"sampling_params": {"n": 129}}, "sampling_params.n"),
        ({"sampling_params": {"n": 2, "best_of": 1}}, "sampling_params.best_of"),
        ({"sampling_params": {"no_repeat_ngram_size": -1}}, "sampling_params.no_repeat_ngram_size"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"sampling_params": {"return_context_logits": True}}, "sampling_params.return_context_logits"),
        ({"sampling_params": {"return_generation_logits": True}}, "sampling_params.return_generation_logits"),
        ({"return_context_logits": True}, "return_context_logits"),
        ({"sampling_params": {"structural_tag": "{}"}}, "sampling_params.structural_tag"),
        ({"sampling_params": {"regex": ""}}, "sampling_params.regex"),
        ({"sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "sampling_params.ebnf"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"sampling_params": {"max_tokens": 2}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": "x"}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens"),
        ({"sampling_params": {"sampling_seed": 1 << 63}}, "sampling_params.sampling_seed"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"logit_bias": {"a": 1}}}, "sampling_params.logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_or_not_built_is_refused_by_name(
    front: Front, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = ask(front, **body, stream=stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].partition("[")[0] == param
    assert param in error["message"]
