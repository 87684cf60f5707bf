"""collective_rpc over two ranks, each on a node of its own: answers in order, between the same steps;
failures by name. Ranks that die: test_node_deaths.py, of the same launch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from carousel import (
    AsyncClient,
    Client,
    GenerationExecutor,
    InvalidRequest,
    RequestError,
    SamplingParams,
)
from tests.harness.nodes import POOL, Nodes, ids_of, nodes
from tests.harness.ring.launched import launched

TIMEOUT_S = 240.0
NUM_STORM = 60
NUM_PINGS = 20
HANGS_S, NAMED_S = 3.0, 0.3
RANKS = [0, 1]


@pytest.fixture(scope="module")
def client(two_nodes: Nodes) -> Iterator[Client]:
    with Client(two_nodes.run_dir) as client:
        yield client


def generate(client: Client, max_tokens: int = 8) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return list(client.generate(ids_of(0), params, timeout=TIMEOUT_S).token_ids)


def refusal(client: Client, method: str, *args: Any, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        client.collective_rpc(method, args, **options)
    return caught.value


def test_every_rank_answers_in_their_order(client: Client) -> None:
    answers = client.collective_rpc("ping")
    assert [answer["rank"] for answer in answers] == RANKS
    assert len({answer["num_steps"] for answer in answers}) == 1


def test_a_method_of_the_extension_keeps_its_state_on_its_rank(client: Client) -> None:
    first = client.collective_rpc("where", kwargs={"label": "a"})
    alone = client.collective_rpc("where", ranks=[1])
    assert [(each["rank"], each["label"]) for each in first] == [(rank, "a") for rank in RANKS]
    assert [(each["rank"], each["calls"]) for each in alone] == [(1, first[1]["calls"] + 1)]
    assert all(each["weights"] > 0 for each in first)


@pytest.mark.parametrize(
    ("method", "args", "code", "text"),
    [
        ("raise_on", [0], "worker_call_failed", "rank 0 on node 0: LookupError: nothing here on 0"),
        ("raise_on", [1], "worker_call_failed", "rank 1 on node 1: LookupError: nothing here on 1"),
        ("missing", [], "worker_call_failed", "rank 0 on node 0: AttributeError: there is no method missing"),
        ("_hidden", [], "worker_call_failed", "rank 0 on node 0: AttributeError: there is no method _hidden"),
        ("where", [1], "worker_call_failed", "rank 0 on node 0: TypeError: "),
        ("huge", [], "worker_call_failed", "rank 0 on node 0: ValueError: it returned 1048578 bytes of JSON"),
        ("no_json", [], "worker_call_failed", "rank 0 on node 0: TypeError: "),
    ],
)
def test_the_first_rank_that_fails_is_named(
    client: Client, method: str, args: list[Any], code: str, text: str
) -> None:
    error = refusal(client, method, *args)
    assert error.code == code
    assert text in str(error)
    assert len(client.collective_rpc("ping")) == len(RANKS)


@pytest.mark.parametrize(
    ("param", "method", "options"),
    [
        ("method", "os.system", {}),
        ("method", "", {}),
        ("ranks", "ping", {"ranks": [2]}),
        ("ranks", "ping", {"ranks": []}),
        ("ranks", "ping", {"ranks": [0, 0]}),
        ("ranks", "ping", {"ranks": [-1]}),
        ("timeout", "ping", {"timeout": 0}),
        ("timeout", "ping", {"timeout": float("nan")}),
        ("args", "ping", {"kwargs": {"x": object()}}),
        ("args", "ping", {"kwargs": {"x": "y" * (1 << 20)}}),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(
    client: Client, param: str, method: str, options: dict[str, Any]
) -> None:
    error = refusal(client, method, **options)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


def test_a_rank_that_hangs_is_named_in_time_and_the_others_go_on_after_it(client: Client) -> None:
    expected = generate(client)
    began = time.monotonic()
    error = refusal(client, "sleep_on", 1, HANGS_S, timeout=NAMED_S)
    assert error.code == "timeout"
    assert f"no answer from rank 1 on node 1 in {NAMED_S:g} s" in str(error)
    assert time.monotonic() - began < HANGS_S
    assert generate(client) == expected  # it waits for the rank, and its late answer is nobody's
    assert client.collective_rpc("sleep_on", [1, 0.0]) == ["awake"] * len(RANKS)


def storm(client: Client, num_requests: int, num_pings: int) -> None:
    """Requests come and are aborted while ranks are called."""

    def request(number: int) -> None:
        params = SamplingParams(max_tokens=1 + number % 40, temperature=1.0, seed=number, ignore_eos=True)
        with client.stream(ids_of(number), params, timeout=TIMEOUT_S) as stream:
            for count, _ in enumerate(stream):
                if count == number % 7:
                    break

    with ThreadPoolExecutor(16) as threads:
        requests = [threads.submit(request, number) for number in range(num_requests)]
        for _ in range(num_pings):
            steps = {answer["num_steps"] for answer in client.collective_rpc("ping", timeout=60.0)}
            assert len(steps) == 1
        for each in requests:
            each.result()


def test_all_ranks_run_a_call_between_the_same_steps_in_a_storm_of_aborts(client: Client) -> None:
    storm(client, NUM_STORM, NUM_PINGS)


@pytest.mark.full
def test_all_ranks_run_a_call_between_the_same_steps_in_a_thousand_aborts(client: Client) -> None:
    storm(client, 1000, 10 * NUM_PINGS)


@pytest.mark.full
def test_the_ranks_of_two_stages_are_called_between_the_same_steps() -> None:
    with launched(*POOL, "--tp-size", "2", "--pp", "2") as launch, Client(launch.run_dir) as client:
        assert [answer["rank"] for answer in client.collective_rpc("ping", timeout=60.0)] == [0, 1, 2, 3]
        storm(client, 1000, NUM_PINGS)


@pytest.mark.full
def test_the_ranks_of_stages_on_two_nodes_are_called_between_the_same_steps() -> None:
    """Also after a rank of the other node has raised, hung and died, each of which is named."""
    settings = (*POOL, "--worker-extension-cls", "tests.harness.probe:Probe")
    with nodes(*settings, layout=(2, 2)) as both, Client(both.run_dir) as client:
        for method, args, timeout, said in (
            ("raise_on", [3], TIMEOUT_S, "rank 3 on node 1: LookupError: nothing here on 3"),
            ("sleep_on", [3, 4.0], 0.5, "no answer from rank 3 on node 1 in 0.5 s"),
            ("end_on", [3], TIMEOUT_S, "collective_rpc"),
        ):
            storm(client, 334, NUM_PINGS)
            began = time.monotonic()
            assert said in str(refusal(client, method, *args, timeout=timeout))
            if method == "sleep_on":
                assert time.monotonic() - began < 4.0
        answers = client.collective_rpc("ping", timeout=TIMEOUT_S)
        assert [answer["rank"] for answer in answers] == [0, 1, 2, 3]


def test_an_event_loop_calls_ranks_too(two_nodes: Nodes) -> None:
    async def ask() -> list[Any]:
        async with AsyncClient(two_nodes.run_dir) as client:
            return await client.collective_rpc("ping", ranks=[1])

    assert [answer["rank"] for answer in asyncio.run(ask())] == [1]


def test_an_executor_calls_ranks_too(two_nodes: Nodes) -> None:
    with GenerationExecutor.create(run_dir=two_nodes.run_dir) as executor:
        assert [answer["rank"] for answer in executor.collective_rpc("ping")] == RANKS
        with pytest.raises(RequestError, match="rank 1 on node 1: LookupError"):
            executor.collective_rpc("raise_on", [1])
        assert executor.generate(ids_of(0), SamplingParams(max_tokens=2)).result(TIMEOUT_S).token_ids
