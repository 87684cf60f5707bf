"""GenerationExecutor with all processes behind it and the demo model: both back ends over one launch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from carousel import (
    Client,
    GenerationExecutor,
    GenerationRequest,
    InvalidRequest,
    RingClosed,
    SamplingParams,
    StartError,
)
from runtime.endpoints import Endpoints
from tests.launched import is_alive, wait_until

PROMPTS = [[5, 6, 7], [20, 21], [300, 301, 302, 303]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def own() -> Iterator[GenerationExecutor]:
    with GenerationExecutor.create(dtype="float32", cpu_threads=1, max_running_requests=4) as executor:
        yield executor


@pytest.fixture(params=["own", "attached"])
def executor(request: pytest.FixtureRequest, own: GenerationExecutor) -> Iterator[GenerationExecutor]:
    if request.param == "own":
        yield own
        return
    with GenerationExecutor.create(run_dir=own.run_dir) as attached:
        yield attached


def num_active(executor: GenerationExecutor) -> int:
    stats = executor.get_latest_stats()
    assert stats is not None
    return stats.num_active_requests


def test_every_way_to_collect_gives_what_the_client_gets(executor: GenerationExecutor) -> None:
    with Client(executor.run_dir) as client:
        expected = [client.generate(prompt, GREEDY, timeout=60).token_ids for prompt in PROMPTS]
    params = [SamplingParams(max_tokens=number, temperature=0.0, ignore_eos=True) for number in (5, 10, 8)]
    batch = executor.generate(PROMPTS, params, timeout=60)
    assert [result.result(0).token_ids for result in batch] == [
        ids[:number] for ids, number in zip(expected, (5, 10, 8), strict=True)
    ]
    ids = executor.enqueue_requests([GenerationRequest(prompt, GREEDY) for prompt in PROMPTS])
    awaited = executor.await_responses(ids, timeout=60)
    assert [response.get_result().token_ids for (response,) in awaited] == expected
    outputs = list(executor.generate_async(PROMPTS[0], GREEDY, streaming=True))
    assert [token for output in outputs for token in output.token_ids_diff] == expected[0]
    assert "".join(output.text_diff for output in outputs) == outputs[-1].text

    async def gather() -> list[list[int]]:
        results = [executor.generate_async(prompt, GREEDY) for prompt in PROMPTS]
        return [output.token_ids for output in await asyncio.gather(*(each.aresult(60) for each in results))]

    assert asyncio.run(gather()) == expected


def test_a_request_that_takes_too_long_is_aborted_by_its_id(executor: GenerationExecutor) -> None:
    result = executor.generate_async(PROMPTS[0], ENDLESS)
    with pytest.raises(TimeoutError):
        result.result(timeout=0.1)
    executor.abort_request(result.request.id)
    assert result.result(10).finish_reason == "abort"
    wait_until(lambda: num_active(executor) == 0, 2.0, "the row is free")


def test_what_the_runtime_refuses_is_the_results_error(executor: GenerationExecutor) -> None:
    with pytest.raises(InvalidRequest) as caught:
        executor.generate_async([1] * 5000, GREEDY).result(60)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest):
        executor.generate_async([10**9], GREEDY).result(60)


def test_stats_count_what_is_active_and_what_is_queued(executor: GenerationExecutor) -> None:
    def load() -> tuple[int, int]:
        stats = executor.get_latest_stats()
        assert stats is not None
        return stats.num_active_requests, stats.num_queued_requests

    results = [executor.generate_async([1 + number], ENDLESS) for number in range(6)]
    try:
        wait_until(lambda: load() == (4, 2), 10.0, "as many as fit are admitted, the others wait")
    finally:
        for result in results:
            result.abort()
    assert {result.result(10).finish_reason for result in results} == {"abort"}
    wait_until(lambda: num_active(executor) == 0, 2.0, "the rows are free")


def test_an_executor_of_its_own_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    executor = GenerationExecutor.create(dtype="float32", cpu_threads=1, max_running_requests=4)
    state = json.loads(Endpoints(executor.run_dir).state_file.read_bytes())
    pids = [state["pid"], *(child["pid"] for child in state["children"])]
    assert len(pids) > 1
    results = [executor.generate_async([1 + number], ENDLESS) for number in range(20)]
    executor.shutdown()
    for result in results:
        with pytest.raises(RingClosed, match="shut down"):
            result.result(0)
    assert not [pid for pid in pids if is_alive(pid)]
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    with pytest.raises(StartError, match="nowhere"):
        GenerationExecutor.create(engine_dir=tmp_path / "nowhere")
    assert list((tmp_path / "temp").iterdir()) == []
