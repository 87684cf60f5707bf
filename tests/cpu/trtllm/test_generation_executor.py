"""GenerationExecutor with all processes behind it and the demo model: both back ends over one launch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carousel import (
    BatchManager,
    CarouselError,
    Client,
    ExecutorConfig,
    GenerationExecutor,
    GenerationRequest,
    InferenceRequest,
    InvalidRequest,
    KvCacheConfig,
    RequestError,
    RingClosed,
    SamplingParams,
    StartError,
)
from runtime.ring.endpoints import Endpoints
from tests.harness.ring.launched import is_alive, wait_until

PROMPTS = [[5, 6, 7], [20, 21], [300, 301, 302, 303]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
MOST = 1500
ENDLESS = SamplingParams(max_tokens=MOST, ignore_eos=True)


@pytest.fixture(scope="module")
def own() -> Iterator[GenerationExecutor]:
    with GenerationExecutor.create(
        dtype="float32",
        cpu_threads=1,
        max_running_requests=4,
        num_postprocess_workers=2,
        gather_all_token_logits=True,
    ) as executor:
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
    assert [response.result.output_token_ids for (response,) in awaited] == [[each] for each in expected]
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


def test_the_recipe_for_a_time_limit_frees_the_servers_work(executor: GenerationExecutor) -> None:
    result = executor.generate_async(PROMPTS[0], ENDLESS)
    try:
        result.result(timeout=0.1)
    except TimeoutError:
        executor.abort_request(result.request.id)

    def all_pages_are_free() -> bool:
        stats = executor.get_latest_stats()
        assert stats is not None
        return stats.num_free_pages == stats.num_pages

    wait_until(all_pages_are_free, 2.0, "the pages are free")
    assert result.result(10).finish_reason == "abort"


def test_a_time_limit_of_the_request_ends_it_with_what_there_is(executor: GenerationExecutor) -> None:
    for limit_s in (0.2, 1.0, 5.0):
        began = time.monotonic()
        output = executor.generate_async(PROMPTS[0], ENDLESS, allotted_time_ms=int(limit_s * 1000)).result(60)
        assert output.finish_reason == "timeout"
        assert limit_s <= time.monotonic() - began
        if output.token_ids:  # a machine that is held up may have had no time for any
            break
    assert 0 < len(output.token_ids) < MOST


def test_without_a_limit_of_tokens_the_output_goes_to_the_end_of_the_context(
    executor: GenerationExecutor,
) -> None:
    prompt = [5 + number % 300 for number in range(executor.config.context_length - 9)]
    no_end = SamplingParams(ignore_eos=True)
    assert GenerationRequest(prompt).sampling_params.max_tokens is None
    no_limit = SamplingParams(max_tokens=None, min_tokens=9, ignore_eos=True)
    assert len(executor.generate_async(prompt, no_end, max_tokens=3).result(60).token_ids) == 3
    output = executor.generate_async(prompt, no_limit).result(60)
    assert (len(output.token_ids), output.finish_reason) == (9, "length")


def test_a_query_behind_a_prompt_is_the_prompt_with_it_and_finds_its_cache(
    executor: GenerationExecutor,
) -> None:
    prompt = [7 + number for number in range(40)]
    whole = executor.generate_async([*prompt, 50, 51], GREEDY).result(60)
    divided = executor.generate_async(prompt, GREEDY, query_token_ids=[50, 51]).result(60)
    other = executor.generate_async(prompt, GREEDY, query_token_ids=[60]).result(60)
    assert divided.token_ids == whole.token_ids
    assert divided.usage is not None
    assert other.usage is not None
    assert divided.usage.prompt_tokens == 42
    page_size = executor.config.page_size
    assert other.usage.cached_tokens >= len(prompt) // page_size * page_size


def test_sequences_of_one_prompt_differ_and_come_again_with_their_seed(executor: GenerationExecutor) -> None:
    params = SamplingParams(n=4, max_tokens=12, seed=11, ignore_eos=True)
    first = executor.generate_async(PROMPTS[2], params).result(60)
    again = executor.generate_async(PROMPTS[2], params, streaming=True)
    by_sequence: dict[int, list[int]] = {index: [] for index in range(4)}
    for output in again:
        by_sequence[output.index] += output.token_ids_diff
    assert [each.index for each in first.outputs] == [0, 1, 2, 3]
    assert [each.token_ids for each in first.outputs] == list(by_sequence.values())
    assert len({tuple(each.token_ids) for each in first.outputs}) == 4


def test_the_best_of_several_are_those_with_the_highest_sum(executor: GenerationExecutor) -> None:
    params = SamplingParams(n=6, logprobs=0, max_tokens=6, seed=3, ignore_eos=True)
    everything = executor.generate_async(PROMPTS[1], params).result(60).outputs
    best = sorted(everything, key=lambda each: each.cumulative_logprob or 0.0, reverse=True)[:2]
    params = SamplingParams(n=2, best_of=6, logprobs=0, max_tokens=6, seed=3, ignore_eos=True)
    chosen = executor.generate_async(PROMPTS[1], params).result(60).outputs
    assert [each.token_ids for each in chosen] == [each.token_ids for each in best]


def test_logits_and_prompt_logprobs_belong_to_the_positions_of_the_input(
    executor: GenerationExecutor,
) -> None:
    params = SamplingParams(
        max_tokens=3,
        temperature=0.0,
        ignore_eos=True,
        prompt_logprobs=0,
        return_context_logits=True,
        return_generation_logits=True,
    )
    prompt = PROMPTS[2]
    output = executor.generate_async(prompt, params).result(60)
    context, generated = output.context_logits, output.generation_logits
    assert context is not None
    assert generated is not None
    assert context.shape[0] == len(prompt)
    assert generated.argmax(axis=1).tolist() == output.token_ids
    assert context[-1].argmax() == output.token_ids[0]
    log_probs = context - np.logaddexp.reduce(context, axis=1, keepdims=True)
    assert output.prompt_logprobs[0] is None
    for position, logprob in enumerate(output.prompt_logprobs[1:], 1):
        assert logprob is not None
        assert logprob.token_id == prompt[position]
        assert abs(logprob.logprob - log_probs[position - 1, prompt[position]]) < 1e-3


def test_the_callbacks_give_what_the_executor_gives(executor: GenerationExecutor) -> None:
    expected = [executor.generate_async(prompt, GREEDY).result(60).token_ids for prompt in PROMPTS]
    to_send = [
        InferenceRequest(
            number,
            {
                "input_ids": np.array([prompt], np.int32),
                "request_output_len": np.array([GREEDY.max_tokens], np.int32),
                "end_id": np.array([-1], np.int32),
                "return_context_logits": np.array([True]),
            },
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    received: dict[int, dict[str, Any]] = {}
    finished = threading.Event()

    def get(_: int) -> list[InferenceRequest]:
        taken, to_send[:] = list(to_send), []
        return taken

    def send(request_id: int, tensors: list[Any], is_final: bool, error: str) -> None:
        assert (is_final, error) == (True, "")
        received[request_id] = dict(tensors)
        if len(received) == len(PROMPTS):
            finished.set()

    with BatchManager(executor, get, send):
        assert finished.wait(60)
    for number, prompt in enumerate(PROMPTS):
        tensors = received[number]
        assert tensors["output_ids"].tolist() == [[prompt + expected[number]]]
        assert tensors["context_logits"].shape[:2] == (1, len(prompt))
        assert tensors["context_logits"][0, -1].argmax() == expected[number][0]


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


def test_statistics_of_each_iteration_are_pulled_and_pushed(executor: GenerationExecutor) -> None:
    executor.generate([3, 4], GREEDY, timeout=60)
    executor.get_latest_iteration_stats()
    stream = executor.get_stats(timeout=30)
    first = next(stream)
    prompt = [7 + len(executor.get_latest_iteration_stats()), *range(100, 150)]
    result = executor.generate(prompt, GREEDY, timeout=60)
    records = executor.get_latest_iteration_stats()
    assert [each.iter for each in records] == list(range(records[0].iter, records[0].iter + len(records)))
    steps = [each.inflight_batching_stats for each in records]
    usage = result.result(10).usage
    assert usage is not None
    assert sum(each.num_ctx_tokens for each in steps if each) == len(prompt) - usage.cached_tokens
    assert records[-1].kv_cache_stats.used_num_blocks == 0
    assert executor.get_latest_iteration_stats() == []
    seen = [first.iter]
    while seen[-1] < records[-1].iter:
        seen.append(next(stream).iter)
    assert seen == list(range(first.iter, records[-1].iter + 1))
    assert stream.num_dropped == 0
    assert list(executor.get_stats(timeout=0.5))[-1] == records[-1]

    async def all_of_them() -> list[int]:
        return [each.iter async for each in executor.aget_stats(timeout=0.5)]

    assert asyncio.run(all_of_them())[-1] == records[-1].iter
    with pytest.raises(RequestError, match="request_stats_max_iterations"):
        executor.get_latest_request_stats()


def _check_prompts_are_computed_whole(executor: GenerationExecutor, longest: int) -> None:
    short = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    prompts = [[5 + number] * longest for number in range(3)]
    executor.generate(prompts, short, timeout=60)
    contexts = [
        batch.num_ctx_tokens
        for each in executor.get_latest_iteration_stats()
        if (batch := each.inflight_batching_stats) is not None and batch.num_context_requests
    ]
    assert contexts == [longest] * 3, "each in a step of its own, and whole"
    with pytest.raises(RequestError, match=rf"{longest + 1} tokens; without chunked prefill.*{longest} "):
        executor.generate([5] * (longest + 1), short, timeout=60)
    assert executor.config.capacity_scheduler == "guaranteed_no_evict"


def test_an_executor_of_its_own_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = ExecutorConfig(max_batch_size=4, max_num_tokens=64, enable_chunked_context=False)
    executor = GenerationExecutor.create(executor_config=config, dtype="float32", cpu_threads=1)
    _check_prompts_are_computed_whole(executor, longest=64)
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


def test_a_killed_process_is_named_to_every_caller_that_waits() -> None:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "cpu_threads": 1,
        "max_running_requests": 4,
        "restart": "never",
    }
    with GenerationExecutor.create(**settings) as executor:
        state = json.loads(Endpoints(executor.run_dir).state_file.read_bytes())
        worker = next(child["pid"] for child in state["children"] if child["role"] == "worker")
        results = [executor.generate_async([1 + number], ENDLESS) for number in range(20)]
        request_id = executor.enqueue_request(GenerationRequest([1], ENDLESS))
        os.kill(worker, signal.SIGKILL)
        for result in results:
            with pytest.raises(CarouselError, match="worker"):
                result.result(10)
        (response,) = executor.await_responses(request_id, timeout=10)
        assert "worker" in response.error_msg
        wait_until(lambda: executor.error is not None, 10.0, "the executor has ended")
        with pytest.raises(RingClosed, match=r"it has failed: .*worker"):
            executor.get_latest_stats()


def test_a_runtime_that_cannot_start_says_why_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    with pytest.raises(StartError, match="nowhere"):
        GenerationExecutor.create(engine_dir=tmp_path / "nowhere")
    with pytest.raises(StartError, match=r"start: kv_cache_config\.max_tokens: 5 is less than a page"):
        GenerationExecutor.create(kv_cache_config=KvCacheConfig(max_tokens=5))
    assert list((tmp_path / "temp").iterdir()) == []
