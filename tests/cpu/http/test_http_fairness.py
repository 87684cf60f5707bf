"""One tenant floods an HTTP server by each way there is, and another one is served meanwhile."""

from __future__ import annotations

import asyncio
import json
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from carousel.client.core.puts import put_async
from carousel.client.core.request.submission import Submission
from carousel.client.core.session import Session
from carousel.server.answer.merged_stream import ENDED_AT_ONCE
from carousel.server.answer.running_prompts import PROMPTS_AT_ONCE
from carousel.server.http.body_pace import BodyPace
from carousel.server.http.body_pool import BodyPool
from carousel.server.request.prompts import MAX_ENTRIES
from carousel.server.sglang import tokenize
from carousel.server.tenancy import fair_threads
from carousel.server.tenancy.entrance import Entrance
from carousel.server.tenancy.fair_turns import FairTurns
from carousel.server.tenancy.unread_answers import UnreadAnswers
from runtime.base.errors import InvalidRequest
from runtime.ring.tenants import OWNER
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, http_front, raw_request
from tests.harness.http.http_tenants import authorization, key_of, tenants_front
from tests.harness.ring.fake_ring import WAIT_S, failure, finish, output, spell
from tests.harness.ring.launched import wait_until

MIB = 1 << 20
QUEUE: dict[str, Any] = {"max_running_requests": 2, "max_queued_requests": 8}


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    asked = [request.text, *(message.content for message in request.messages or ())]
    return [] if "silence" in asked else spell("abc")(request)


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    assert int(response.headers["retry-after"]) >= 1
    return response.status_code, error["type"], error["code"]


def silent(front: Front, name: str, **body: Any) -> Any:
    """A request that is never answered."""
    return front.open_raw("/v1/completions", headers=authorization(name), prompt="silence", **body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tenant_that_fills_the_queue_leaves_room_for_another(tmp_path: Path, stream: bool) -> None:
    with tenants_front(tmp_path, answer, **QUEUE) as (front, callers), ExitStack() as held:
        for number in range(3):
            held.callback(silent(front, "alice", n=2, stream=stream).close)
            front.ring.wait_request(number)
        for number in (3, 4):
            header, body = authorization("alice"), {"input": "silence", "stream": stream}
            held.callback(front.open_raw("/v1/responses", headers=header, **body).close)
            front.ring.wait_request(number)
        limited = (429, "rate_limit_error", "rate_limit_exceeded")
        two = {"prompt": ["x", "y"], "stream": stream}
        assert refusal(callers["alice"].post("/v1/completions", json=two)) == limited
        for path, asked in (
            ("/v1/completions", {"prompt": "x", "stream": stream}),
            ("/v1/responses", {"input": "x", "stream": stream}),
        ):
            assert refusal(callers["alice"].post(path, json=asked)) == limited
            assert callers["bob"].post(path, json=asked).status_code == 200
        assert {request.tenant for request in front.ring.requests} == {"alice", "bob"}


def test_the_only_tenant_may_have_all_of_the_queue(tmp_path: Path) -> None:
    """A key that may only look at the metrics needs none of it."""
    names = ["alice", "mona"]
    with tenants_front(tmp_path, answer, names=names, **QUEUE) as (front, callers), ExitStack() as held:
        for number in range(5):
            held.callback(silent(front, "alice", n=2).close)
            front.ring.wait_request(number)
        refused = callers["alice"].post("/v1/completions", json={"prompt": "x"})
        assert refusal(refused) == (503, "server_error", "client_overloaded")


def test_a_list_of_prompts_is_begun_as_the_tenants_share_allows(tmp_path: Path) -> None:
    with tenants_front(tmp_path, answer, **QUEUE) as (_, callers):
        response = callers["alice"].post("/v1/completions", json={"prompt": ["x"] * 40})
        assert response.status_code == 200
        assert len(response.json()["choices"]) == 40


def half_body(front: Front, name: str, num_bytes: int) -> Any:
    """A connection on which half of a body is sent."""
    connection = front.connect()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {2 * num_bytes}\r\n{authorization(name)}\r\n".encode())
    connection.sendall(b" " * num_bytes)
    return connection


def test_half_bodies_of_one_tenant_take_no_others_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carousel.server.http.body_pool.WAIT_S", 0.5)
    monkeypatch.setattr("carousel.server.server_state.BodyPool", partial(BodyPool, size=16 * MIB))
    with tenants_front(tmp_path, answer) as (front, callers), ExitStack() as held:
        alices = [held.enter_context(half_body(front, "alice", MIB)) for _ in range(12)]
        answered, _, _ = select.select(alices, [], [], WAIT_S)
        received = answered[0].recv(65536)
        assert received.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: " in received.lower()
        large = json.dumps({"prompt": "x"}) + " " * MIB
        headers = {"Content-Type": "application/json"}
        for _ in range(3):
            response = callers["bob"].post("/v1/completions", content=large, headers=headers)
            assert response.status_code == 200, response.text


def test_bodies_of_strangers_wait_in_no_line_of_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload of 7 MB by the holder of the only key took 2.5 to 5.2 s beside those of 100 connections with
    a wrong one, and 0.2 s alone. A body has 30 s.
    """
    lines: list[str] = []
    wait = BodyPace.wait

    def note(self: BodyPace, go_on: Callable[[], None], tenant: str = OWNER) -> None:
        lines.append(tenant)
        wait(self, go_on, tenant)

    monkeypatch.setattr(BodyPace, "wait", note)
    with http_front(tmp_path, answer, api_key=key_of("owner")) as front, silent(front, "owner"):
        front.ring.wait_request(0)
        with half_body(front, "alice", MIB) as stranger:
            assert stranger.recv(65536).startswith(b"HTTP/1.1 401 ")
            wait_until(lambda: len(lines) > 4, WAIT_S, "the rest of the body is read in pieces")
    assert OWNER not in lines


def test_requests_enter_in_their_tenants_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/unit/server/test_entrance.py shows what comes of it."""
    entered: list[str] = []
    enter = Entrance.enter

    async def note(self: Entrance, num_bytes: int, tenant: str = "") -> None:
        entered.append(tenant)
        await enter(self, num_bytes, tenant)

    monkeypatch.setattr(Entrance, "enter", note)
    with tenants_front(tmp_path, answer) as (_, callers):
        for name in ("alice", "bob"):
            assert callers[name].post("/tokenize", json={"prompt": "x"}).status_code == 200
    assert entered == ["alice", "bob"]


@pytest.fixture
def held_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Texts that begin with "hold" keep their thread until the event is set."""
    release = threading.Event()
    tokenize_one = tokenize._tokenize_one

    def hold(prompt: Any, *about: Any, **more: Any) -> Any:
        if prompt.startswith("hold"):
            release.wait(WAIT_S)
        return tokenize_one(prompt, *about, **more)

    monkeypatch.setattr(tokenize, "_tokenize_one", hold)
    yield release
    release.set()


def test_long_texts_of_one_tenant_wait_behind_anothers_short_one(
    tmp_path: Path, held_thread: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/tokenize has one thread. What waits for it of one tenant is bounded, and of each one call is next."""
    monkeypatch.setattr(fair_threads, "MAX_WAITING_CHARS", 100_000)
    done: list[str] = []
    in_line: list[str] = []
    turns: list[str] = []
    take = FairTurns.take

    async def note(self: FairTurns, tenant: str) -> None:
        in_line.append(tenant)
        await take(self, tenant)
        turns.append(tenant)

    monkeypatch.setattr(FairTurns, "take", note)
    with tenants_front(tmp_path, answer) as (front, _):

        def tokenize_as(name: str, text: str) -> int:
            with front.open_client() as client:
                headers = {"Authorization": f"Bearer {key_of(name)}"}
                status = client.post("/tokenize", json={"prompt": text}, headers=headers).status_code
            done.append(f"{name} {status}")
            return status

        alices = [
            threading.Thread(target=tokenize_as, args=("alice", "hold" + " x" * 10_000)) for _ in range(8)
        ]
        for thread in alices:
            thread.start()
        wait_until(lambda: "alice 429" in done, 5.0, "alice has too much waiting")
        bob = threading.Thread(target=tokenize_as, args=("bob", "x" * 50_000))
        bob.start()
        wait_until(lambda: "bob" in in_line, 5.0, "bob is in line")
        held_thread.set()
        for thread in (bob, *alices):
            thread.join(WAIT_S)
    served = [each for each in done if each.endswith("200")]
    assert "bob 200" in served
    # Callers may hear in another order of what has been done.
    assert list(filter(None, turns)).index("bob") <= 2, turns
    assert len(served) + done.count("alice 429") == 9


def test_openais_client_tries_again_when_it_is_told(tmp_path: Path) -> None:
    refused: list[GenerateRequest] = []

    def limited(request: GenerateRequest) -> list[SequenceOutput]:
        if not refused:
            refused.append(request)
            return [failure(request, "rate_limit_exceeded", 429, retry_after_s=1.0)]
        return spell("abc")(request)

    async def main(front: Front) -> None:
        url = f"http://127.0.0.1:{front.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key_of("alice"), max_retries=2) as client:
            completion = await client.completions.create(model="fake", prompt="x")
            assert completion.choices[0].text == "abc"
        refused.clear()
        async with openai.AsyncOpenAI(base_url=url, api_key=key_of("alice"), max_retries=0) as client:
            with pytest.raises(openai.RateLimitError) as error:
                await client.completions.create(model="fake", prompt="x")
            assert error.value.type == "rate_limit_error"
        async with openai.AsyncOpenAI(base_url=url, api_key=key_of("mona"), max_retries=0) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.completions.create(model="fake", prompt="x")

    with tenants_front(tmp_path, limited) as (front, _):
        asyncio.run(main(front))
        assert len(front.ring.requests) == 3


def note_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of prompts that will be sent in each turn of the event loop in which any is."""
    num_sent = [0]

    async def noted(session: Any, submission: Any) -> None:
        if not num_sent[-1]:
            asyncio.get_running_loop().call_soon(num_sent.append, 0)
        num_sent[-1] += 1
        await put_async(session, submission)

    monkeypatch.setattr("carousel.client.core.streams.put_async", noted)
    return num_sent


@pytest.mark.parametrize("is_stream", [False, True])
def test_of_many_prompts_few_are_sent_in_a_turn_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """A thousand of 2,000 ids each took 150 ms in one piece, and two thousand of a word 33 ms."""
    num_sent = note_sent(monkeypatch)
    with http_front(tmp_path, answer, max_running_requests=512) as front:
        found = front.post("/v1/completions", prompt=["x"] * 256, max_tokens=1, stream=is_stream)
        assert found.status_code == 200, found.text
    assert sum(num_sent) == 256
    assert max(num_sent) <= 2 * PROMPTS_AT_ONCE


BIASES = {str(token): 1.0 for token in range(1024)}
MOST_PROMPTS = MAX_ENTRIES // (2 * len(BIASES))


def test_of_prompts_with_a_thousand_biases_even_fewer_are_sent_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are checked for each prompt: eight at once took 35 ms, and with all other lists 82 ms."""
    num_sent = note_sent(monkeypatch)
    with http_front(tmp_path, answer, max_running_requests=512) as front:
        found = front.post("/v1/completions", prompt=["x"] * MOST_PROMPTS, max_tokens=1, logit_bias=BIASES)
        assert found.status_code == 200, found.text
    assert sum(num_sent) == MOST_PROMPTS
    assert max(num_sent) <= PROMPTS_AT_ONCE // 2


def test_lists_of_parameters_are_bounded_for_all_prompts_of_a_request(tmp_path: Path) -> None:
    """400 prompts with a thousand biases, in a body of 13 KB, took the scheduler 141 MB."""
    texts = ["x"] * (MOST_PROMPTS + 1)
    with http_front(tmp_path, answer, max_running_requests=512) as front:
        for stops in ({"logit_bias": BIASES}, {"allowed_token_ids": [1] * 2 * len(BIASES)}):
            for path, body in (
                ("/v1/completions", {"prompt": texts, **stops}),
                ("/generate", {"text": texts, "sampling_params": stops}),
            ):
                found = front.post(path, **body)
                assert found.status_code == 400, found.text
                assert f"more than {MAX_ENTRIES}" in found.text
        assert front.ring.requests == []
        short = front.post("/v1/completions", prompt=["x"] * 400, stop=["x" * 15] * 16, max_tokens=1)
        assert short.status_code == 200, short.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_many_prompts_are_aborted_a_few_in_a_turn_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """A thousand took 15 to 20 ms in one piece when their caller left."""
    num_aborted = [0]
    abort = Session._send_abort

    def noted(self: Any, request: Any) -> None:
        if not num_aborted[-1]:
            asyncio.get_running_loop().call_soon(num_aborted.append, 0)
        num_aborted[-1] += 1
        abort(self, request)

    monkeypatch.setattr(Session, "_send_abort", noted)
    with http_front(tmp_path, answer, max_running_requests=512) as front:
        with front.open_raw("/v1/completions", prompt=["silence"] * 256, stream=is_stream):
            front.ring.wait_request(255)
        wait_until(lambda: sum(num_aborted) == 256, WAIT_S, "all prompts are aborted")
    assert max(num_aborted) <= ENDED_AT_ONCE


def test_prompts_behind_one_that_is_refused_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand texts to /rerank, of a model that only generates, were begun and ended in 27 ms."""
    begun: list[Submission] = []

    async def refused(_: Any, submission: Submission) -> None:
        begun.append(submission)
        raise InvalidRequest("no")

    monkeypatch.setattr("carousel.client.core.streams.put_async", refused)
    with http_front(tmp_path, answer) as front:
        found = front.post("/rerank", query="x", documents=["x"] * 1000)
        assert found.status_code == 400, found.text
    assert 1 <= len(begun) <= 4 * PROMPTS_AT_ONCE


def test_an_unread_answer_counts_for_its_tenant_whatever_is_pipelined_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted for the owner: the last request of the connection had not come to its tenant yet."""
    counted: list[str] = []
    pause = UnreadAnswers.pause

    def noted(self: UnreadAnswers, transport: asyncio.Transport, tenant: str) -> None:
        counted.append(tenant)
        pause(self, transport, tenant)

    def long_answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [output(request, "x" * 8 * MIB, token_ids=b"", finish=finish())]

    monkeypatch.setattr(UnreadAnswers, "pause", noted)
    with tenants_front(tmp_path, long_answer) as (front, _), front.connect() as connection:
        connection.sendall(2 * raw_request("/v1/completions", headers=authorization("alice"), prompt="x"))
        wait_until(lambda: bool(counted), WAIT_S, "the caller does not read")
    assert set(counted) == {"alice"}
