"""Client against a fake ring: prompts, results, aborts, errors."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carousel import (
    Client,
    InvalidRequest,
    Overloaded,
    PromptTuningConfig,
    RequestAborted,
    RequestError,
    SamplingParams,
)
from carousel.client.core.mailbox import Item, Mailbox
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.handle import client_of
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.ring.fake_ring import (
    CLIENT_ID,
    WAIT_S,
    FakeRing,
    failure,
    fake_ring,
    finish,
    output,
    spell,
)


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[FakeRing]:
    with fake_ring(tmp_path, spell("abc")) as ring:
        yield ring


@pytest.fixture
def client(ring: FakeRing) -> Iterator[Client]:
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        yield client


def test_a_completion_holds_everything_that_the_terminal_says(client: Client) -> None:
    completion = client.generate("hello", label="mine")
    assert completion.text == "abc"
    assert completion.token_ids == [97, 98, 99]
    assert completion.finish_reason == "stop"
    assert completion.usage.completion_tokens == 3
    assert completion.usage.cached_tokens == 2
    assert completion.label == "mine"


def test_a_completion_has_the_prompt_as_it_was_given(client: Client) -> None:
    """Scripts for vLLM read `output.prompt` beside `output.outputs[0].text`."""
    text, ids, talk = (
        client.generate("hello"),
        client.generate([1, 2]),
        client.chat([{"role": "user", "content": "a"}]),
    )
    assert (text.prompt, text.prompt_token_ids) == ("hello", None)
    assert (ids.prompt, ids.prompt_token_ids) == (None, [1, 2])
    assert (talk.prompt, talk.prompt_token_ids) == (None, None)


def test_a_stream_gives_each_delta_and_then_ends(client: Client) -> None:
    deltas = list(client.stream("hello"))
    assert "".join(delta.text for delta in deltas) == "abc"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].usage is not None
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_requests_carry_a_handle_of_this_client_and_never_the_same_twice(
    client: Client, ring: FakeRing
) -> None:
    client.generate(["a", "b", "c"])
    handles = [request.handle for request in ring.requests]
    assert len(set(handles)) == 3
    assert {client_of(handle) for handle in handles} == {CLIENT_ID}


def test_an_unseeded_request_gets_a_seed_and_a_seeded_one_keeps_it(client: Client, ring: FakeRing) -> None:
    client.generate(["a", "b"])
    client.generate("c", SamplingParams(seed=11))
    seeds = [request.sampling.seed for request in ring.requests]
    assert None not in seeds
    assert seeds[0] != seeds[1]
    assert seeds[2] == 11


def test_all_forms_of_a_prompt_reach_the_wire(client: Client, ring: FakeRing) -> None:
    client.generate("text")
    client.generate([1, 2, 3])
    client.generate(np.array([4, 5]))
    client.generate([{"role": "user", "content": "hi"}])
    text, ids, array, chat = ring.requests
    assert text.text == "text"
    assert ids.input_ids == pack_ids([1, 2, 3])
    assert array.input_ids == pack_ids([4, 5])
    assert chat.messages is not None
    assert (chat.messages[0].role, chat.messages[0].content) == ("user", "hi")


def test_no_prompts_give_no_completions(client: Client) -> None:
    assert client.generate([]) == []


def test_sampling_parameters_may_be_one_for_each_prompt(client: Client, ring: FakeRing) -> None:
    client.generate(["a", "b"], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=4)])
    assert [request.sampling.max_tokens for request in ring.requests] == [3, 4]
    with pytest.raises(InvalidRequest, match="1 for 2 prompts"):
        client.generate(["a", "b"], [SamplingParams()])


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("context_length_exceeded", 400, InvalidRequest),
        ("overloaded", 503, Overloaded),
        ("lagged", 500, RequestError),
    ],
)
def test_an_error_on_the_wire_becomes_its_exception(
    tmp_path: Path, code: str, status: int, kind: type[RequestError]
) -> None:
    with (
        fake_ring(tmp_path, lambda request: [failure(request, code, status, "prompt")]),
        Client(tmp_path) as client,
    ):
        with pytest.raises(kind) as caught:
            client.generate("x", timeout=WAIT_S)
        assert (caught.value.code, caught.value.status) == (code, status)


def test_leaving_a_stream_aborts_its_request(tmp_path: Path) -> None:
    with fake_ring(tmp_path, lambda request: [output(request, "a")]) as ring, Client(tmp_path) as client:
        for _ in client.stream("x", timeout=WAIT_S):
            break
        assert ring.wait_abort().handles == (ring.requests[0].handle,)


def test_a_finished_stream_aborts_nothing(client: Client, ring: FakeRing) -> None:
    list(client.stream("x"))
    gc.collect()
    client.server_info()
    assert ring.aborts == []


def test_an_explicit_abort_delivers_the_rest_and_finish_reason_abort(tmp_path: Path) -> None:
    with fake_ring(tmp_path, lambda request: [output(request, "a")]) as ring, Client(tmp_path) as client:
        stream = client.stream("x", timeout=WAIT_S)
        assert next(stream).text == "a"
        client.abort(stream)
        handle = ring.wait_abort().handles[0]
        ring.send(SequenceOutput(handle, "b", pack_ids([98]), finish=finish("abort")))
        assert [delta.finish_reason for delta in stream] == ["abort"]
        assert stream.state.completion().text == "ab"


def test_what_is_no_stream_cannot_be_aborted(client: Client) -> None:
    for given in ("a label", None, 3):
        with pytest.raises(InvalidRequest, match="stream: a ResultStream as `stream` returns it, got"):
            client.abort(given)  # type: ignore[arg-type]


def test_a_timeout_aborts_the_request(tmp_path: Path) -> None:
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        with pytest.raises(TimeoutError):
            client.generate("x", timeout=0.05)
        assert ring.wait_abort().handles == (ring.requests[0].handle,)


def test_logprobs_come_with_their_tokens(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [
            output(
                request,
                "ab",
                logprobs=np.array([-0.5, -1.0], np.float32).tobytes(),
                top_ids=pack_ids([97, 7, 98, 8]),
                top_logprobs=np.array([-0.5, -2.0, -1.0, -3.0], np.float32).tobytes(),
                finish=finish(cumulative_logprob=-1.5),
            )
        ]

    with fake_ring(tmp_path, answer), Client(tmp_path) as client:
        completion = client.generate("x", SamplingParams(logprobs=2), timeout=WAIT_S)
        assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
        assert completion.logprobs[1].top == ((98, -1.0), (8, -3.0))
        assert completion.cumulative_logprob == -1.5


@pytest.mark.parametrize("text", ["stop", "stop_token_ids", "logit_bias"])
def test_convenient_spellings_are_understood(client: Client, ring: FakeRing, text: str) -> None:
    spelled: dict[str, Any] = {"stop": "END", "stop_token_ids": [3], "logit_bias": {"5": 1.0, 6: -1.0}}
    client.generate("x", SamplingParams(**{text: spelled[text]}))
    wire = {"stop": ("END",), "stop_token_ids": (3,), "logit_bias": ((5, 1.0), (6, -1.0))}
    assert getattr(ring.requests[0].sampling, text) == wire[text]


@pytest.mark.parametrize(
    ("prompt", "sampling", "options", "param"),
    [
        ([1, -2], {}, {}, "prompt"),
        ([True, 1], {}, {}, "prompt"),
        ([1, 2.5], {}, {}, "prompt"),
        ([1 << 31], {}, {}, "prompt"),
        (np.array([]), {}, {}, "prompt"),
        (None, {}, {}, "prompt"),
        (5, {}, {}, "prompt"),
        (b"bytes", {}, {}, "prompt"),
        ({"role": "user", "content": "x"}, {}, {}, "prompt"),
        ([None], {}, {}, "prompt"),
        ([{"role": "user"}], {}, {}, "messages"),
        ([{"role": "user", "content": "x"}] * 4097, {}, {}, "messages"),
        ([{"role": "user", "content": "x", "image": "y"}], {}, {}, "messages"),
        ("x", {"temperature": -1.0}, {}, "temperature"),
        ("x", {"stop": 3}, {}, "stop"),
        ("x", {"logit_bias": [5]}, {}, "logit_bias"),
        ("x", {"logit_bias": [(1,)]}, {}, "logit_bias"),
        ("x", {"ignore_eos": "yes"}, {}, "ignore_eos"),
        ("x", {}, {"label": "y" * 257}, "label"),
        ("x", {}, {"cache_salt": "y" * 257}, "cache_salt"),
        ("x", {}, {"priority": 1001}, "priority"),
    ],
)
def test_a_wrong_argument_is_refused_at_the_call_by_its_name(
    client: Client,
    ring: FakeRing,
    prompt: Any,
    sampling: dict[str, Any],
    options: dict[str, Any],
    param: str,
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(prompt, SamplingParams(**sampling), **options)
    assert caught.value.param == param
    client.server_info()
    assert ring.requests == []


def test_what_the_wire_does_not_carry_is_refused_and_not_lost(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        client.generate("\ud800")


@pytest.mark.parametrize("sampling", [{"temperature": 1}, 5, "greedy"])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_sampling_parameters_of_another_type_are_refused(client: Client, prompt: Any, sampling: Any) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params"):
        client.generate(prompt, sampling)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, threading.TIMEOUT_MAX - 1e6])
def test_a_timeout_may_be_longer_than_any_clock(client: Client, timeout: float) -> None:
    assert client.generate("x", timeout=timeout).text == "abc"
    assert client.server_info(timeout=timeout)


def test_closing_a_stream_ends_the_thread_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, waits = Mailbox.take, threading.Event()

    def noted(mailbox: Mailbox, deadline: float | None) -> list[Item]:
        waits.set()
        return take(mailbox, deadline)

    monkeypatch.setattr(Mailbox, "take", noted)
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        stream = client.stream("x")
        caught: list[BaseException] = []

        def read() -> None:
            try:
                next(stream)
            except RequestAborted as error:
                caught.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert waits.wait(WAIT_S)
        stream.close()
        reader.join(WAIT_S)
        assert len(caught) == 1
        ring.wait_abort()


def test_a_stream_that_was_closed_early_has_no_completion(tmp_path: Path) -> None:
    with fake_ring(tmp_path, lambda request: [output(request, "a")]), Client(tmp_path) as client:
        stream = client.stream("x", timeout=WAIT_S)
        next(stream)
        stream.close()
        with pytest.raises(RequestAborted, match="before its end"):
            stream.completion()


def test_a_stream_that_has_failed_says_so_as_often_as_its_completion_is_asked_for(tmp_path: Path) -> None:
    with fake_ring(tmp_path, lambda request: [failure(request, "enough", 500)]), Client(tmp_path) as client:
        stream = client.stream("x", timeout=WAIT_S)
        for _ in range(2):
            with pytest.raises(RequestError) as raised:
                stream.completion()
            assert raised.value.code == "enough"


def test_an_unknown_keyword_is_a_type_error(client: Client) -> None:
    options: dict[str, Any] = {"cach_salt": "y"}
    with pytest.raises(TypeError, match="cach_salt"):
        client.generate("x", **options)


def test_server_info_is_answered_by_number(client: Client) -> None:
    assert client.server_info() == {"op": "server_info"}
    assert client.flush_cache() == {"op": "flush_cache"}


def test_threads_share_a_client(client: Client) -> None:
    results: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: results.extend(client.generate("x", timeout=WAIT_S).text for _ in range(20))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == ["abc"] * 160


def test_ids_and_text_of_a_stream_add_up_in_its_state(client: Client, ring: FakeRing) -> None:
    stream = client.stream([1, 2])
    for _ in stream:
        pass
    assert stream.state.token_ids == [97, 98, 99]
    assert stream.state.text == "abc"
    packed = stream.state.request.input_ids
    assert packed is not None
    assert unpack_ids(packed).tolist() == [1, 2]


def test_an_error_about_the_prompt_names_the_callers_argument(tmp_path: Path) -> None:
    with fake_ring(tmp_path, lambda request: [failure(request, "invalid_value", 400, "input_ids")]):
        with Client(tmp_path) as client, pytest.raises(InvalidRequest) as caught:
            client.generate([1, 2], timeout=WAIT_S)
        assert caught.value.param == "prompt"


def test_vectors_that_are_not_taken_in_are_named_and_a_limit_of_the_caller_is_his(
    ring: FakeRing, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carousel.client.core.puts.PATIENCE_S", 0.05)
    ring.answers_questions = False
    options: Any = {"prompt_tuning_config": PromptTuningConfig(np.ones((1, 8), np.float32))}
    with pytest.raises(RequestError, match=r"prompt_tuning_config: .* within 0\.05 s") as caught:
        client.generate([1], **options)
    assert (caught.value.status, caught.value.code) == (503, "timeout")
    with pytest.raises(TimeoutError, match="time limit of the call"):
        client.generate([1], timeout=0.02, **options)
    assert not ring.requests
