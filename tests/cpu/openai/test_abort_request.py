"""/abort_request over a fake ring: who may end what, and what the callers of that get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import httpx
import pytest

from carousel.client.core.request.submission import Submission
from carousel.server.admin.siblings import Siblings
from carousel.server.answer.running_prompts import ABORT_RETRY_S, RunningPrompts
from carousel.server.request.held_body import STATE
from carousel.server.running import AbortOrder, RunningRequests
from carousel.server.tenancy.entrance import Entrance
from runtime.ring.tenants import Tenant
from tests.harness.http.http_front import Front, events
from tests.harness.http.http_tenants import tenants_front
from tests.harness.ring.fake_ring import finish, output, spell

Callers: TypeAlias = dict[str, httpx.Client]
NUM_PROMPTS = 100
Ask: TypeAlias = Callable[..., "Future[httpx.Response]"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Callers]]:
    with tenants_front(tmp_path_factory.mktemp("keys")) as (front, callers):
        yield front, callers


@pytest.fixture
def ask(served: tuple[Front, Callers]) -> Iterator[Ask]:
    """Post a request of a caller, and wait until the ring has it."""
    front, callers = served
    with ThreadPoolExecutor(8) as pool:

        def begin(name: str, path: str, *, num_prompts: int = 1, **body: Any) -> Future[httpx.Response]:
            seen = len(front.ring.requests)
            answer = pool.submit(callers[name].post, path, json=body)
            front.ring.wait_for(lambda: len(front.ring.requests) == seen + num_prompts)
            return answer

        yield begin
        # Nobody waits for an answer that does not come.
        unended = [request for request in front.ring.requests if request.handle not in ENDED]
        abort(front, callers["root"], len(unended), abort_all=True)


ENDED: set[bytes] = set()
"""Handles that have had their end."""


def abort(front: Front, caller: httpx.Client, number: int, **body: Any) -> set[str | None]:
    """Give an order, of which the ring is to hear for `number` sequences, and end these as the scheduler
    does. Returns their prompts.
    """
    response = caller.post("/abort_request", json=body)
    assert (response.status_code, response.json()) == (200, {}), response.text
    front.ring.wait_for(lambda: len(set(front.ring.aborted()) - ENDED) >= number)
    ended = [request for request in front.ring.requests if request.handle in front.ring.aborted()]
    ended = [request for request in ended if request.handle not in ENDED]
    for request in ended:
        ENDED.add(request.handle)
        front.ring.send(output(request, "ab", finish=finish("abort", 2)))
    return {request.text for request in ended}


def test_an_aborted_request_is_answered_with_what_there_is(served: tuple[Front, Callers], ask: Ask) -> None:
    front, callers = served
    answers = {
        "/generate": ask("alice", "/generate", text="one", rid="mine"),
        "/v1/completions": ask("alice", "/v1/completions", prompt="two"),
        "stream": ask("alice", "/generate", text="three", stream=True, rid="streamed"),
    }
    assert abort(front, callers["alice"], 1, rid="mine") == {"one"}
    body = answers["/generate"].result().json()
    assert body["text"] == "ab"
    assert body["meta_info"]["finish_reason"] == {"type": "abort", "message": "ended by /abort_request"}
    assert abort(front, callers["alice"], 1, rid="streamed") == {"three"}
    *_, last, done = events(answers["stream"].result())
    assert (last["text"], last["meta_info"]["finish_reason"]["type"], done) == ("ab", "abort", "[DONE]")
    assert not answers["/v1/completions"].done()
    assert abort(front, callers["alice"], 1, abort_all=True) == {"two"}
    (choice,) = answers["/v1/completions"].result().json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "abort")


def test_a_key_ends_its_own_requests_only_and_an_admin_all(served: tuple[Front, Callers], ask: Ask) -> None:
    front, callers = served
    answers = {
        name: ask(name, "/generate", text=f"of {name}", rid="same") for name in ("alice", "bob", "root")
    }
    assert callers["mona"].post("/abort_request", json={"abort_all": True}).status_code == 403
    assert abort(front, callers["alice"], 1, rid="same") == {"of alice"}
    assert abort(front, callers["root"], 1, rid="same") == {"of root"}
    answers["alice"].result()  # until then the name is taken
    again = ask("alice", "/generate", text="again", rid="same")
    assert abort(front, callers["bob"], 1, abort_all=True) == {"of bob"}
    assert not again.done()
    ask("bob", "/generate", text="bob's", rid="other")
    assert abort(front, callers["root"], 2, abort_all=True) == {"again", "bob's"}


def test_a_rid_of_several_prompts_ends_all_and_that_of_one_ends_it(
    served: tuple[Front, Callers], ask: Ask
) -> None:
    front, callers = served
    both = ask("alice", "/generate", num_prompts=2, text=["p", "q"], rid="batch")
    assert abort(front, callers["alice"], 1, rid="batch_1") == {"q"}
    assert not both.done()
    assert abort(front, callers["alice"], 1, rid="batch") == {"p"}
    reasons = [each["meta_info"]["finish_reason"]["type"] for each in both.result().json()]
    assert reasons == ["abort", "abort"]


def test_prompts_that_wait_for_others_of_their_request_are_not_begun(tmp_path: Path) -> None:
    """An HTTP process has room for two sequences here, so that the third prompt waits in it."""
    with (
        tenants_front(tmp_path, max_running_requests=1, max_queued_requests=2) as (front, callers),
        ThreadPoolExecutor(1) as pool,
    ):
        prompts = [str(number) for number in range(40)]
        body = {"text": prompts, "rid": "long", "sampling_params": {"max_new_tokens": 1}}
        answer = pool.submit(callers["alice"].post, "/generate", json=body)
        front.ring.wait_request()
        begun = len(front.ring.requests)
        assert begun < len(prompts)
        assert callers["alice"].post("/abort_request", json={"rid": "long"}).status_code == 200
        front.ring.wait_for(lambda: len(set(front.ring.aborted())) >= len(front.ring.requests))
        for request in list(front.ring.requests):
            front.ring.send(output(request, "ab", finish=finish("abort", 2)))
        results = answer.result().json()
        assert len(results) == len(prompts)
        assert {each["meta_info"]["finish_reason"]["type"] for each in results} == {"abort"}
        assert [each["text"] for each in results].count("") == len(prompts) - len(front.ring.requests)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "rid"),
        ({"rid": None, "abort_all": False}, "rid"),
        ({"rid": "x", "abort_all": True}, "rid"),
        ({"rid": ["x"]}, "rid"),
        ({"rid": "x" * 257}, "rid"),
        ({"abort_all": 1}, "abort_all"),
        ({"abort_all": True, "odd": 1}, "odd"),
    ],
)
def test_what_is_no_order_is_refused_by_name(
    served: tuple[Front, Callers], body: dict[str, Any], param: str
) -> None:
    response = served[1]["alice"].post("/abort_request", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_an_answer_is_as_ever_when_nothing_was_aborted(served: tuple[Front, Callers]) -> None:
    front, callers = served
    assert callers["alice"].post("/abort_request", json={"rid": "unknown"}).json() == {}
    front.ring.answer = spell("abc")
    assert callers["alice"].post("/generate", json={"text": "x"}).json()["text"] == "abc"


def test_the_http_processes_of_a_launch_pass_orders_on(tmp_path: Path) -> None:
    """One of three is not there, and one was there before under the same name."""

    async def talk() -> list[list[AbortOrder]]:
        places = [tmp_path / str(number) for number in range(3)]
        heard: list[list[AbortOrder]] = [[], []]
        first = Siblings(places, 0, heard[0].append)
        first.close()
        both = [Siblings(places, number, heard[number].append) for number in range(2)]
        try:
            order = AbortOrder(None)
            await both[0].tell(order)
            await both[1].tell(AbortOrder("alice", "r"))
            while not all(heard):
                await asyncio.sleep(0)
        finally:
            for each in both:
                each.close()
        return heard

    assert asyncio.run(talk()) == [[AbortOrder("alice", "r")], [AbortOrder(None)]]


class Told:
    """Notes which prompts of a request were aborted."""

    def __init__(self) -> None:
        self.prompts: list[int] = []

    def abort(self, prompts: Any) -> None:
        self.prompts += prompts


@pytest.mark.parametrize(
    ("rid", "told"),
    [("r", [[0], [0, 1], []]), ("r_1", [[], [1], []]), ("r_1_0", [[], [], [0]]), ("_", [[], [], []])],
)
def test_names_are_matched_whole(rid: str, told: list[list[int]]) -> None:
    running, requests = RunningRequests(), [Told(), Told(), Told()]
    holds = [["r"], ["r_0", "r_1"], ["r_1_0", "x"]]
    with (
        running.hold("a", requests[0], holds[0]),
        running.hold("a", requests[1], holds[1]),
        running.hold("a", requests[2], holds[2]),
    ):
        running.abort(AbortOrder("a", rid))
        running.abort(AbortOrder("b"))
    assert [each.prompts for each in requests] == told
    running.abort(AbortOrder(None))
    assert [each.prompts for each in requests] == told


def test_prompts_that_wait_for_their_turn_are_aborted_when_it_comes() -> None:
    """Each was looked at every 10 ms until then, which took half of the event loop's time for 2,000."""
    tried: list[int] = []

    class Watched(RunningPrompts):
        def _end_early(self, prompt: int) -> None:
            tried.append(prompt)
            super()._end_early(prompt)

    async def main() -> None:
        client = SimpleNamespace(of_tenant=lambda name: None)
        server = cast(Any, SimpleNamespace(client=client, entrance=Entrance()))
        state = {STATE: SimpleNamespace(has_turn=False), "received_s": 0.0}
        prompts = Watched(server, Tenant("alice", "user"), [Submission("x")] * NUM_PROMPTS, state)
        prompts.streams = {number: cast(Any, SimpleNamespace(state=None)) for number in range(NUM_PROMPTS)}
        prompts.abort_all()
        tried.clear()
        await asyncio.sleep(5 * ABORT_RETRY_S)
        assert set(tried) <= {0}, "the first may be about to be sent"
        await prompts.wait_for_turn(1)
        await asyncio.sleep(5 * ABORT_RETRY_S)
        assert set(tried) == {0, 1}
        prompts.streams.clear()

    asyncio.run(main())
