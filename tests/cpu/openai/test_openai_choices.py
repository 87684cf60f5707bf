"""Several choices of a prompt, echoed prompts and their logprobs, over a fake ring."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carousel.client.core.request.submission import Submission
from carousel.server.request.prompts import check_size
from runtime.base.errors import InvalidRequest
from runtime.wire.format import unpack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from runtime.wire.sampling_params import SamplingParams
from tests.harness.http.http_front import Front, events, http_front
from tests.harness.ring.fake_ring import PROMPT_TOKENS, WAIT_S, finish, output

TIMEOUT = "ran out of time"


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def prompt_part(request: GenerateRequest) -> dict[str, Any]:
    """Prompt logprobs: -1, -2 ... from the second token on, and of the most likely ones itself and id 7."""
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return {}
    start = request.sampling.prompt_logprobs_start
    ids = unpack_ids(request.input_ids or b"").tolist()[start + 1 :]
    fields: dict[str, Any] = {"prompt_logprobs": floats(*(-1.0 - start - i for i in range(len(ids))))}
    # The first of the most likely ones itself, where any are asked for.
    fields["prompt_ranks"] = np.full(len(ids), 1 if num_top else 57, np.int32).tobytes()
    if num_top:
        top = [[token, 7, 8][:num_top] for token in ids]
        fields["prompt_top_ids"] = np.array(top, np.int32).tobytes()
        fields["prompt_top_logprobs"] = floats(*([-1.0, -2.0, -np.inf][:num_top] * len(ids)))
    return fields


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Sequence i says its letter i + 1 times, one token each, with logprob -i - 0.5 for each of them."""
    outputs = []
    for index in range(request.sampling.n):
        letter = "abcdefgh"[index]
        text = letter * (index + 1)
        fields: dict[str, Any] = prompt_part(request) if index == 0 else {}
        if request.sampling.logprobs is not None:
            fields["logprobs"] = floats(*([-0.5 - index] * len(text)))
        reason = "timeout" if request.text == TIMEOUT else "length"
        end = finish(reason, len(text), cumulative_logprob=-len(text) * (0.5 + index))
        if request.stream and fields and "prompt_logprobs" in fields:
            # The prompt's come first, in pieces, and after the other sequences' first tokens.
            first = {name: fields.pop(name) for name in list(fields) if name.startswith("prompt")}
            outputs.append(SequenceOutput(request.handle, **first))
        fields["num_prompt_tokens"] = PROMPT_TOKENS if request.stream else 0
        outputs.append(output(request, text, index=index, finish=end, **fields))
    if request.stream:
        outputs.sort(key=lambda each: each.handle == request.handle)
    return outputs


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), answer) as front:
        yield front


def complete(front: Front, **body: Any) -> Any:
    response = front.complete(**body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(front: Front, path: str = "/v1/completions", **body: Any) -> list[Any]:
    *chunks, done = events(front.post(path, stream=True, **body))
    assert done == "[DONE]"
    return chunks


def texts_of(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


# -- n and best_of -------------------------------------------------------------------------------------------


def test_n_gives_as_many_choices_and_counts_the_prompt_once(front: Front) -> None:
    body = complete(front, n=3)
    assert [(each["index"], each["text"]) for each in body["choices"]] == [(0, "a"), (1, "bb"), (2, "ccc")]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 6
    assert front.ring.requests[-1].sampling.n == 3


def test_choices_of_several_prompts_are_numbered_through(front: Front) -> None:
    body = complete(front, prompt=["x", "y"], n=2)
    expected = {0: "a", 1: "bb", 2: "a", 3: "bb"}
    assert {each["index"]: each["text"] for each in body["choices"]} == expected
    assert body["usage"]["prompt_tokens"] == 10
    chunks = streamed(front, prompt=["x", "y"], n=2, stream_options={"include_usage": True})
    assert texts_of(chunks) == expected
    assert chunks[-1]["usage"] == body["usage"]


def test_chat_has_as_many_choices_each_with_its_role_and_end(front: Front) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = front.chat(n=2).json()
    assert [each["message"]["content"] for each in body["choices"]] == ["a", "bb"]
    chunks = streamed(front, "/v1/chat/completions", messages=messages, n=2)
    assert texts_of(chunks) == {0: "a", 1: "bb"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sorted(each["index"] for each in choices if "role" in each["delta"]) == [0, 1]
    assert sorted(each["index"] for each in choices if each["finish_reason"]) == [0, 1]


def test_best_of_keeps_the_most_likely_and_counts_them_all(front: Front) -> None:
    body = complete(front, n=2, best_of=4)
    assert [(each["index"], each["text"]) for each in body["choices"]] == [(0, "a"), (1, "bb")]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 10
    assert front.ring.requests[-1].sampling.n == 4


def test_best_of_is_the_same_in_chat_and_generate(front: Front) -> None:
    best = front.post("/generate", text="x", sampling_params={"n": 2, "best_of": 4}).json()
    assert [each["text"] for each in best] == ["a", "bb"]
    assert "output_token_logprobs" not in best[0]["meta_info"]
    body = front.chat(n=2, best_of=4).json()
    choices = [(each["index"], each["message"]["content"], each["logprobs"]) for each in body["choices"]]
    assert choices == [(0, "a", None), (1, "bb", None)]
    assert body["usage"]["completion_tokens"] == 10
    for wrong in ({"n": 2, "best_of": 1}, {"best_of": 2, "stream": True}):
        response = front.chat(**wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 9, "n": 114}, "n"),
        ({"prompt": ["x"] * 9, "best_of": 114}, "n"),
    ],
)
def test_more_than_one_request_may_have_is_refused_by_name(
    front: Front, body: dict[str, Any], param: str
) -> None:
    seen = len(front.ring.requests)
    response = front.complete(**body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(front.ring.requests) == seen


def test_all_that_is_told_of_a_prompt_is_that_of_what_truncation_leaves(front: Front) -> None:
    """Ids are cut here where the answer shows them; the ring then gets them without the field."""
    ids = list(range(300, 400))
    asked = {"prompt": ids, "max_tokens": 4, "echo": True, "logprobs": 1, "return_token_ids": True}
    for wanted, kept in [(3, ids[-3:]), (-1, ids[-60:]), (64, ids[-63:])]:
        (choice,) = complete(front, truncate_prompt_tokens=wanted, **asked)["choices"]
        request = front.ring.requests[-1]
        assert unpack_ids(request.input_ids or b"").tolist() == kept
        assert request.sampling.truncate_prompt_tokens is None
        assert choice["prompt_token_ids"] == kept
        assert len(choice["logprobs"]["tokens"]) == len(kept) + 1  # one comes of the output
        whole = complete(front, **{**asked, "prompt": kept})["choices"][0]
        assert (choice["text"], choice["logprobs"]) == (whole["text"], whole["logprobs"])
    text = "one two three four " * 50
    cut, uncut = (
        complete(front, prompt=each, max_tokens=1, echo=True, truncate_prompt_tokens=4)["choices"][0]["text"]
        for each in (text, "x")
    )
    assert text.endswith(cut[:-1])
    assert 4 < len(cut) < 60
    assert uncut == "xa"
    messages = [{"role": "user", "content": text}]
    body = front.chat(messages=messages, truncate_prompt_tokens=5, return_token_ids=True).json()
    assert len(body["prompt_token_ids"]) == 5
    sampling = {"truncate_prompt_tokens": 3, "max_new_tokens": 1}
    meta = front.post(
        "/generate", input_ids=ids, sampling_params=sampling, return_logprob=True, logprob_start_len=0
    ).json()["meta_info"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == ids[-3:]
    for wrong in ({"truncate_prompt_tokens": 65, "echo": True}, {"truncate_prompt_tokens": 0}):
        error = front.complete(**wrong).json()["error"]
        assert (error["param"], error["type"]) == ("truncate_prompt_tokens", "invalid_request_error")


@pytest.mark.parametrize(("context_length", "is_refused"), [(64, False), (128, True)])
def test_logprobs_of_many_choices_have_a_bound(context_length: int, is_refused: bool) -> None:
    sampling = SamplingParams(n=128, max_tokens=1 << 20, logprobs=20)
    asked = [Submission("x", sampling)]
    if not is_refused:
        check_size(asked, context_length)
        return
    with pytest.raises(InvalidRequest) as refused:
        check_size(asked, context_length)
    assert refused.value.param == "logprobs"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"n": 128, "prompt": [5] * 2000, "prompt_logprobs": 20}, "prompt_logprobs"),
        (
            "/v1/completions",
            {"n": 128, "prompt": [5] * 2000, "echo": True, "logprobs": 20, "max_tokens": 0},
            "logprobs",
        ),
        (
            "/generate",
            {
                "input_ids": [5] * 2000,
                "sampling_params": {"n": 128, "max_new_tokens": 1},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 20,
            },
            "logprob_start_len",
        ),
    ],
)
def test_logprobs_of_a_prompt_count_as_often_as_they_are_shown(
    front: Front, path: str, body: dict[str, Any], param: str
) -> None:
    seen = len(front.ring.requests)
    response = front.post(path, **body)
    assert response.status_code == 400, response.text[:1000]
    assert response.json()["error"]["param"] == param
    assert len(front.ring.requests) == seen


def test_generate_answers_a_list_for_several_sequences(front: Front) -> None:
    body = {"text": ["x", "y"], "rid": ["one", "two"], "sampling_params": {"n": 2}}
    answers = front.post("/generate", **body).json()
    assert [each["text"] for each in answers] == ["a", "bb", "a", "bb"]
    assert [each["meta_info"]["id"] for each in answers] == ["one", "one", "two", "two"]
    assert len(front.post("/generate", text="x", sampling_params={"n": 2}).json()) == 2
    chunks = streamed(front, "/generate", **body)
    assert {each["index"]: each["text"] for each in chunks} == {0: "a", 1: "bb", 2: "a", 3: "bb"}


# -- echo and prompt logprobs --------------------------------------------------------------------------------


def test_echo_shows_the_prompt_before_each_choice(front: Front) -> None:
    body = complete(front, prompt="def f", echo=True, n=2)
    assert [each["text"] for each in body["choices"]] == ["def fa", "def fbb"]
    assert body["choices"][0]["logprobs"] is None
    assert texts_of(streamed(front, prompt="def f", echo=True, n=2)) == {0: "def fa", 1: "def fbb"}


def ids_of(front: Front, text: str) -> list[int]:
    ids: list[int] = front.post("/tokenize", prompt=text).json()["tokens"]
    return ids


def test_echoed_ids_are_shown_as_text(front: Front) -> None:
    ids = ids_of(front, "import os")
    body = complete(front, prompt=ids, echo=True)
    assert body["choices"][0]["text"].endswith("import osa")


@pytest.mark.parametrize("as_ids", [False, True])
def test_echoed_logprobs_cover_prompt_and_output(front: Front, as_ids: bool) -> None:
    ids = ids_of(front, "import os")
    prompt: Any = ids if as_ids else "import os"
    (choice,) = complete(front, prompt=prompt, echo=True, logprobs=2, max_tokens=1)["choices"]
    columns = choice["logprobs"]
    assert columns["token_logprobs"] == [None, *(-1.0 - i for i in range(len(ids) - 1)), -0.5]
    assert len(columns["tokens"]) == len(columns["text_offset"]) == len(ids) + 1
    assert columns["top_logprobs"][0] is None
    # The token itself and the most likely ones, of which minus infinity is no number in JSON.
    assert set(columns["top_logprobs"][1].values()) == {-1.0, -2.0}
    ends = [at + len(token) for at, token in zip(columns["text_offset"], columns["tokens"], strict=True)]
    assert columns["text_offset"][1:] == ends[:-1]


def test_a_request_for_no_tokens_shows_the_prompt_alone(front: Front) -> None:
    """Evaluation harnesses ask so for the likelihood of a text, and read the answer so."""
    ids = ids_of(front, "import os, sys")
    num_context = 2
    body = complete(front, prompt=[ids, ids], echo=True, logprobs=1, max_tokens=0, temperature=0)
    for choice in body["choices"]:
        values = choice["logprobs"]["token_logprobs"][num_context:]
        tops = choice["logprobs"]["top_logprobs"][num_context:]
        assert values == [-1.0 - i for i in range(num_context - 1, len(ids) - 1)]
        assert all(max(top.values()) >= value for top, value in zip(tops, values, strict=True))
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert front.ring.requests[-1].sampling.max_tokens == 1
    assert front.complete(max_tokens=0).json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_echoes_the_prompt_with_its_logprobs_first(front: Front, n: int) -> None:
    ids = ids_of(front, "import os")
    chunks = streamed(front, prompt="import os", echo=True, logprobs=0, n=n)
    for index in range(n):
        own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert own[0]["text"] == "import os"
        assert own[0]["logprobs"]["token_logprobs"] == [None, *(-1.0 - i for i in range(len(ids) - 1))]
        offsets = [at for each in own if each["logprobs"] for at in each["logprobs"]["text_offset"]]
        assert offsets == sorted(offsets)
        assert own[-1]["finish_reason"] == "length"


def test_prompt_logprobs_are_by_token_id_with_their_rank(front: Front) -> None:
    ids = ids_of(front, "import os")
    (choice,) = complete(front, prompt="import os", prompt_logprobs=2)["choices"]
    first, second, *_ = choice["prompt_logprobs"]
    assert first is None
    assert second[str(ids[1])]["logprob"] == -1.0
    assert second[str(ids[1])]["rank"] == 1
    assert second["7"]["rank"] == 2
    body = front.chat(prompt_logprobs=0).json()
    assert body["prompt_logprobs"][0] is None
    assert all(each["rank"] == 57 for token in body["prompt_logprobs"][1:] for each in token.values())
    assert len(body["prompt_logprobs"]) > 1
    refused = front.complete(prompt_logprobs=0, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_generate_gives_input_logprobs_from_the_wanted_token_on(front: Front) -> None:
    ids = ids_of(front, "import os, sys")

    def meta(**body: Any) -> Any:
        body = {"text": "import os, sys", "return_logprob": True, **body}
        (last,) = [streamed(front, "/generate", **body)[-1]]
        whole = front.post("/generate", **body).json()
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert last["meta_info"].get(name) == whole["meta_info"].get(name)
        return whole["meta_info"]

    assert meta()["input_token_logprobs"] == []
    values = [[None if i == 0 else -float(i), token, None] for i, token in enumerate(ids)]
    assert meta(logprob_start_len=0)["input_token_logprobs"] == values
    later = meta(logprob_start_len=1, top_logprobs_num=1)
    assert later["input_token_logprobs"] == [[None, ids[1], None], *values[2:]]
    assert later["input_top_logprobs"] == [None, *([[-1.0, token, None]] for token in ids[2:])]


@pytest.mark.parametrize(
    ("prompt", "skips", "text"),
    [
        ([0, 0, 300], None, "<|endoftext|><|endoftext|>"),
        ([0, 0, 300], True, ""),
        ("<|endoftext|>x", None, "<|endoftext|>"),
    ],
)
def test_offsets_of_an_echo_are_places_in_its_text(front: Front, prompt: Any, skips: Any, text: str) -> None:
    """They had counted special tokens that the text left out."""
    (choice,) = complete(front, prompt=prompt, echo=True, logprobs=0, skip_special_tokens=skips)["choices"]
    columns = choice["logprobs"]
    first = len(columns["tokens"]) - 2
    assert choice["text"].startswith(text)
    assert columns["text_offset"][first] == len(text)
    assert choice["text"].startswith(columns["tokens"][first], len(text))


def test_offsets_count_a_character_of_several_tokens_once(front: Front) -> None:
    text = "é😀 héllo 中文 x"
    (choice,) = complete(front, prompt=text, echo=True, logprobs=0, max_tokens=1)["choices"]
    columns = choice["logprobs"]
    assert columns["text_offset"] == sorted(columns["text_offset"])
    shown = [
        (choice["text"][at : at + len(token)], token)
        for token, at in zip(columns["tokens"], columns["text_offset"], strict=True)
        if "\ufffd" not in token
    ]
    assert len(shown) < len(columns["tokens"])
    assert [place for place, _ in shown] == [token for _, token in shown]
    assert columns["text_offset"][-1] == len(text)


# -- ids, usage, ends ----------------------------------------------------------------------------------------


def test_token_ids_are_returned_when_asked_for(front: Front) -> None:
    ids = ids_of(front, "import os")
    (choice,) = complete(front, prompt="import os", return_token_ids=True)["choices"]
    assert choice["token_ids"] == [ord("a")]
    assert choice["prompt_token_ids"] == ids
    chunks = streamed(front, prompt="import os", return_token_ids=True)
    assert [each["choices"][0].get("prompt_token_ids") for each in chunks] == [ids]
    chat = front.chat(return_token_ids=True).json()
    assert chat["choices"][0]["token_ids"] == [ord("a")]
    assert chat["prompt_token_ids"]
    first, *_ = streamed(
        front, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], return_token_ids=True
    )
    assert first["prompt_token_ids"] == chat["prompt_token_ids"]


def test_tokens_can_be_shown_as_ids(front: Front) -> None:
    (choice,) = complete(front, logprobs=0, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97"]
    content = front.chat(logprobs=True, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert content["content"][0]["token"] == "token_id:97"


def test_every_event_has_the_usage_so_far_when_asked_for(front: Front) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(front, prompt="import os", stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1]
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks] == [PROMPT_TOKENS]
    chat = streamed(
        front, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream_options=options
    )
    assert chat[0]["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert [chunk["usage"]["completion_tokens"] for chunk in chat[:2]] == [0, 1]  # the role is no token
    assert all(chunk["usage"] for chunk in chat)
    assert last["choices"] == []
    # Nothing was encoded here for that: the stream tells how long its prompt is.
    assert [request.input_ids for request in front.ring.requests[-2:]] == [None, None]


def test_the_usage_so_far_counts_prompts_that_have_not_begun(front: Front) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, *_ = streamed(front, prompt=["import os", "x"], stream_options=options)
    assert first["usage"]["prompt_tokens"] > PROMPT_TOKENS


def test_a_time_limit_reaches_the_wire_and_ends_as_a_length(front: Front) -> None:
    body = complete(front, prompt=TIMEOUT, time_limit=0.25)
    assert front.ring.requests[-1].time_limit_ms == 250
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["stop_reason"] == "time_limit"
    *_, chunk = streamed(front, prompt=TIMEOUT, time_limit=1)
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert chunk["choices"][0]["stop_reason"] == "time_limit"
    meta = front.post("/generate", text=TIMEOUT, time_limit=1.5).json()["meta_info"]
    assert meta["finish_reason"] == {"type": "timeout"}


@pytest.mark.parametrize("value", [0, -1, "x", 1e7])
def test_a_time_limit_that_is_none_is_refused_by_name(front: Front, value: Any) -> None:
    assert front.complete(time_limit=value).json()["error"]["param"] == "time_limit"


def test_a_conversation_is_continued_and_its_template_gets_variables(front: Front) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    response = front.chat(messages=messages, continue_final_message=True)
    assert response.status_code == 200, response.text
    wire = front.ring.requests[-1]
    assert (wire.continue_final_message, wire.add_generation_prompt) == (True, False)
    assert front.chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert b"enable_thinking" in front.ring.requests[-1].template_kwargs
    refused = front.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_more_prompts_than_may_wait_are_served_one_after_the_other(tmp_path: Path) -> None:
    """All at once they would be refused, however often they are sent."""
    with http_front(tmp_path, max_queued_requests=2) as front, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(front.complete, prompt=["x"] * 5)
        ring = front.ring
        for num_before in (0, 2, 4):
            num_due = min(num_before + 2, 5)
            ring.wait_request(num_due - 1)
            assert front.http.get("/server_info").status_code == 200  # what was sent before has arrived
            assert len(ring.requests) == num_due
            ring.send(*(output(request, "a", finish=finish()) for request in ring.requests[num_before:]))
        response = answer.result(WAIT_S)
    assert [choice["text"] for choice in response.json()["choices"]] == ["a"] * 5
