"""Every case of the table of bad input gets its answer, and the next good request its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from carousel import Client, SamplingParams
from runtime.base.errors import RequestError
from runtime.wire.handle import make_handle
from tests.harness.http.bad_input import CONTEXT, HTTP_CASES, SERVED, HttpCase
from tests.harness.ring.bad_input_frames import (
    FRAME_CASES,
    REQUEST,
    SAMPLING,
    SDK_CASES,
    FrameCase,
    SdkCase,
    request_of,
)
from tests.harness.ring.launched import Launched, launched
from tests.harness.ring.raw_client import RawClient

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    settings = ("--context-length", str(CONTEXT), "--served-model-name", SERVED, "--cpu-threads", "1")
    with launched(*settings, "--max-running-requests", "8") as launch:
        pids = launch.pids()
        yield launch
        assert launch.pids() == pids
        assert launch.process.poll() is None
        assert "Traceback" not in launch.log()


@pytest.fixture(scope="module")
def http(launch: Launched) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=launch.url, timeout=60.0) as http:
        yield http


@pytest.fixture(scope="module")
def client(launch: Launched) -> Iterator[Client]:
    with Client(launch.run_dir) as client:
        yield client


@pytest.fixture
def raw_client(launch: Launched) -> Iterator[RawClient]:
    client = RawClient(launch.run_dir, launch.state()["epoch"])
    yield client
    client.close()


def test_the_table_is_large_and_names_no_case_twice() -> None:
    cases: list[Any] = [*HTTP_CASES, *SDK_CASES, *FRAME_CASES]
    assert len(cases) >= 80
    for table in (HTTP_CASES, SDK_CASES, FRAME_CASES):
        ids = [case.id for case in table]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("case", HTTP_CASES, ids=lambda case: case.id)
def test_bad_input_over_http(http: httpx.Client, case: HttpCase) -> None:
    response = http.request(case.method, case.path, content=case.content(), headers=dict(case.headers))
    assert response.status_code == case.status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (case.code, case.param), error
    assert case.part in error["message"]
    assert len(error["message"]) < 1000
    good = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert good.status_code == 200, good.text


@pytest.mark.parametrize("case", SDK_CASES, ids=lambda case: case.id)
def test_bad_input_through_the_client_library(client: Client, case: SdkCase) -> None:
    with pytest.raises(RequestError) as refused:
        client.generate(case.prompt, SamplingParams(**{"max_tokens": 1, **case.sampling}), **case.options)
    error = refused.value
    assert (error.status, error.code, error.param) == (case.status, case.code, case.param), error.message
    assert case.part in error.message
    assert client.generate("x", GREEDY, timeout=60).token_ids


@pytest.mark.parametrize("case", FRAME_CASES, ids=lambda case: case.id)
def test_bad_input_in_frames(raw_client: RawClient, client: Client, case: FrameCase) -> None:
    raw_client.send(case.frames(raw_client.codec, raw_client.id))
    if case.code is not None:
        finish = raw_client.wait_finish(make_handle(raw_client.id, REQUEST))
        assert finish.error is not None
        assert (finish.error.code, finish.error.param) == (case.code, case.param), finish.error
        assert finish.error.status == 400
    good = make_handle(raw_client.id, REQUEST + 1)
    raw_client.send([raw_client.codec.encode(request_of(raw_client.id, handle=good))])
    assert raw_client.wait_finish(good).reason in ("length", "stop")


def test_a_handle_that_is_played_again_gets_one_answer(raw_client: RawClient) -> None:
    frame = raw_client.codec.encode(request_of(raw_client.id, sampling=SAMPLING))
    for _ in range(3):
        raw_client.send([frame])
    assert raw_client.wait_finish(make_handle(raw_client.id, REQUEST)).reason in ("length", "stop", "error")
    good = make_handle(raw_client.id, REQUEST + 1)
    raw_client.send([raw_client.codec.encode(request_of(raw_client.id, handle=good))])
    assert raw_client.wait_finish(good).reason in ("length", "stop")


def test_a_handle_of_another_client_is_not_answered_to_it(
    launch: Launched, raw_client: RawClient, client: Client
) -> None:
    """A made-up id of a client has no address behind it."""
    stranger = make_handle(raw_client.id ^ 0x5A5A, REQUEST)
    raw_client.send([raw_client.codec.encode(request_of(raw_client.id, handle=stranger))])
    good = make_handle(raw_client.id, REQUEST + 1)
    raw_client.send([raw_client.codec.encode(request_of(raw_client.id, handle=good))])
    assert raw_client.wait_finish(good).reason in ("length", "stop")
    assert client.generate("x", GREEDY, timeout=60).token_ids
