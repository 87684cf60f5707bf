"""GenerationResult and the executor's end, with both back ends: what holds, whoever owns the runtime."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from carousel import (
    GenerationExecutor,
    GenerationRequest,
    InvalidRequest,
    Overloaded,
    RequestError,
    RingClosed,
    SamplingParams,
    StructuredOutputsParams,
    TokenLogprob,
)
from carousel.trtllm import runtime_link
from runtime.ring.endpoints import Endpoints
from runtime.wire.messages import GenerateRequest, SequenceOutput, TensorBatch, TensorEntry
from tests.harness.ring.executor_back_ends import BACK_ENDS, Make, echo, executors, spell_each
from tests.harness.ring.fake_ring import (
    CLIENT_ID,
    WAIT_S,
    FakeRing,
    failure,
    finish,
    output,
    say_nothing,
    spell,
)
from tests.harness.ring.stand_in_runtime import StandInRuntime


@pytest.fixture(params=BACK_ENDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with executors(request.param, tmp_path, monkeypatch) as make:
        yield make


def test_a_result_holds_everything_that_the_terminal_says(make: Make) -> None:
    executor, _ = make(spell("abc"))
    result = executor.generate_async([1, 2], SamplingParams(max_tokens=5))
    final = result.result(WAIT_S)
    assert (final.index, final.text, final.text_diff, final.token_ids) == (0, "abc", "abc", [97, 98, 99])
    assert final.finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == 3
    assert final.outputs == [final] == result.outputs
    assert result.result() == final
    assert (final.prompt_logprobs, final.context_logits, final.generation_logits) == ([], None, None)
    assert result.request.prompt_token_ids == [1, 2]


def test_a_result_is_done_when_its_end_has_come_and_not_before(make: Make) -> None:
    executor, ring = make()
    result = executor.generate_async([1])
    request = ring.wait_request()
    assert not result.done
    ring.send(output(request, "x", finish=finish()))
    changed = threading.Event()
    result.on_change(changed.set)
    assert changed.wait(WAIT_S)
    assert result.done


def test_a_time_limit_leaves_the_request_running(make: Make) -> None:
    executor, ring = make()
    result = executor.generate_async([1])
    with pytest.raises(TimeoutError, match="time limit"):
        result.result(timeout=0.01)
    with pytest.raises(TimeoutError, match="time limit"):
        asyncio.run(result.aresult(timeout=0.01))
    ring.send(output(ring.wait_request(), "late", finish=finish()))
    assert result.result(WAIT_S).text == "late"
    assert ring.aborts == []


def test_iterating_adds_up_and_ends_with_the_finished_output(make: Make) -> None:
    executor, _ = make(spell("abcdef"))
    result = executor.generate_async([1], streaming=True)
    outputs = list(result)
    assert "".join(each.text_diff for each in outputs) == outputs[-1].text == "abcdef"
    assert [token for each in outputs for token in each.token_ids_diff] == outputs[-1].token_ids
    assert [each.finish_reason is not None for each in outputs] == [False] * (len(outputs) - 1) + [True]
    assert list(result) == []
    assert result.result(0).text == "abcdef"


def test_an_iteration_gets_everything_though_the_result_was_read_before(make: Make) -> None:
    executor, _ = make(spell("abc"))
    result = executor.generate_async([1], streaming=True)
    result.result(WAIT_S)
    assert "".join(each.text_diff for each in result) == "abc"


def test_async_iteration_works_in_one_loop_after_the_other(make: Make) -> None:
    executor, ring = make()
    result = executor.generate_async([1], streaming=True)

    async def first() -> str:
        return (await anext(aiter(result))).text

    async def rest() -> list[str]:
        return [each.text_diff async for each in result]

    ring.send(output(ring.wait_request(), "a"))
    assert asyncio.run(first()) == "a"
    ring.send(output(ring.wait_request(), "b", finish=finish()))
    assert "".join(asyncio.run(rest())) == "b"


def test_many_results_are_awaited_together(make: Make) -> None:
    executor, _ = make(echo)

    async def main() -> list[str]:
        results = [executor.generate_async([65 + number % 26]) for number in range(100)]
        return [each.text for each in await asyncio.gather(*(result.aresult(WAIT_S) for result in results))]

    assert asyncio.run(main()) == [chr(65 + number % 26) for number in range(100)]


def test_cancelling_a_waiting_task_loses_nothing(make: Make) -> None:
    executor, ring = make()
    result = executor.generate_async([1])

    async def main() -> str:
        task = asyncio.create_task(result.aresult())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ring.send(output(ring.wait_request(), "x", finish=finish()))
        return (await result.aresult(WAIT_S)).text

    assert asyncio.run(main()) == "x"
    assert ring.aborts == []


def test_a_result_is_done_when_its_last_sequence_has_ended(make: Make) -> None:
    executor, ring = make()
    result = executor.generate_async([1], SamplingParams(n=3))
    request = ring.wait_request()
    changed = threading.Semaphore(0)
    result.on_change(changed.release)
    for num_finished, index in enumerate((2, 0, 1), 1):
        assert not result.done
        with pytest.raises(TimeoutError):
            result.result(timeout=0.0)
        ring.send(output(request, "abc"[index], index=index, finish=finish()))
        assert changed.acquire(timeout=WAIT_S)
        assert len([each for each in result.outputs if each.finish_reason]) == num_finished
    assert result.done
    final = result.result(0)
    assert [(each.index, each.text) for each in final.outputs] == [(0, "a"), (1, "b"), (2, "c")]
    assert final == final.outputs[0]


def test_iterating_gives_the_news_of_each_sequence_by_itself(make: Make) -> None:
    texts = ("abcd", "ef", "ghi")
    executor, _ = make(spell_each(*texts))
    result = executor.generate_async([1], SamplingParams(n=3), streaming=True)
    outputs = list(result)
    for index, text in enumerate(texts):
        own = [each for each in outputs if each.index == index]
        assert "".join(each.text_diff for each in own) == own[-1].text == text
        assert [each.finish_reason is not None for each in own] == [False] * (len(own) - 1) + [True]
    assert [each.text for each in outputs[0].outputs] == list(texts)


def test_no_sequence_is_kept_waiting_by_the_others(make: Make) -> None:
    executor, ring = make()
    result = executor.generate_async([1], SamplingParams(n=3), streaming=True)
    request = ring.wait_request()
    changed = threading.Event()
    result.on_change(changed.set)
    seen = []
    for _ in range(3):
        changed.clear()
        ring.send(*(output(request, "x", index=index) for index in range(3)))
        assert changed.wait(WAIT_S)
        seen.append(next(result).index)
    assert sorted(seen) == [0, 1, 2]
    result.abort()
    ring.send(*(output(request, "", index=index, finish=finish("abort")) for index in range(3)))
    assert {each.finish_reason for each in result if each.finish_reason} == {"abort"}


def test_the_best_of_several_are_there_when_all_have_ended_and_not_before(make: Make) -> None:
    executor, ring = make()
    result = executor.generate_async([1], SamplingParams(n=2, best_of=3))
    request = ring.wait_request()
    ends = [finish(cumulative_logprob=value) for value in (-3.0, -1.0, -2.0)]
    ring.send(*(output(request, "abc"[index], index=index, finish=ends[index]) for index in (0, 1)))
    with pytest.raises(TimeoutError):
        result.result(timeout=0.01)
    assert result.outputs == []
    ring.send(output(request, "c", index=2, finish=ends[2]))
    final = result.result(WAIT_S)
    assert [(each.index, each.text) for each in final.outputs] == [(0, "b"), (1, "c")]
    with pytest.raises(InvalidRequest, match="best_of"):
        executor.generate_async([1], SamplingParams(n=2, best_of=3), streaming=True)


def test_one_failed_sequence_fails_the_request_once(make: Make) -> None:
    executor, ring = make(
        lambda request: [output(request, "ab"), failure(request, "internal_error", 500, index=1)]
    )
    result = executor.generate_async([1], SamplingParams(n=2), streaming=True)
    with pytest.raises(RequestError, match="internal_error"):
        result.result(WAIT_S)
    assert result.done
    assert ring.wait_abort().handles == (ring.requests[0].handle,)
    assert (next(result).text, len(result.outputs)) == ("ab", 2)
    with pytest.raises(RequestError, match="internal_error"):
        next(result)
    assert list(result) == []


def test_prompt_logprobs_and_logits_are_the_results(make: Make) -> None:
    executor, ring = make()
    params = SamplingParams(prompt_logprobs=0, return_context_logits=True, return_generation_logits=True)
    result = executor.generate_async([5, 6, 7], params)
    request = ring.wait_request()
    context, generated = np.eye(3, dtype=np.float32), np.ones((1, 3), np.float32)
    entries = (
        TensorEntry(request.handle, "context_logits", "float32", (3, 3), 0),
        TensorEntry(request.handle, "generation_logits", "float32", (1, 3), 0),
    )
    ring.send_message(TensorBatch(entries), [context.tobytes(), generated.tobytes()])
    values = np.array([-1.0, -2.0], np.float32).tobytes()
    ring.send(output(request, "a", prompt_logprobs=values, finish=finish()))
    final = result.result(WAIT_S)
    expected = [None, TokenLogprob(6, -1.0), TokenLogprob(7, -2.0)]
    assert result.prompt_logprobs == final.prompt_logprobs == expected
    assert result.context_logits is not None
    assert np.array_equal(result.context_logits, context)
    assert final.context_logits is not None
    assert final.generation_logits is not None
    assert np.array_equal(final.generation_logits, generated)


def test_a_result_does_not_keep_its_executor_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = FakeRing(tmp_path, say_nothing)
    runtime = StandInRuntime(ring)
    monkeypatch.setattr(runtime_link, "OwnRuntime", lambda *_: runtime)
    executor = GenerationExecutor.create()
    result = executor.generate_async([1], streaming=True)
    request_id = executor.enqueue_request(GenerationRequest([2]))
    ring.wait_request(1)
    dropped = weakref.ref(executor)
    del executor
    assert dropped() is None
    assert (runtime.num_stops, request_id) == (1, 2)
    with pytest.raises(RingClosed, match="shut down"):
        result.result(0)
    with pytest.raises(RingClosed, match="shut down"):
        next(result)
    result.abort()
    ring.close()


def test_iterating_over_a_result_that_is_not_streaming_is_refused(make: Make) -> None:
    executor, _ = make(spell("abc"))
    with pytest.raises(RuntimeError, match="not streaming"):
        list(executor.generate_async([1]))


def test_an_error_reaches_its_own_result_only_and_each_time(make: Make) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [failure(request, "overloaded", 503)] if request.label == "bad" else echo(request)

    executor, _ = make(answer)
    bad = executor.generate_async([65], label="bad")
    good = executor.generate_async([66])
    for _ in range(2):
        with pytest.raises(Overloaded):
            bad.result(WAIT_S)
    with pytest.raises(Overloaded):
        asyncio.run(bad.aresult(WAIT_S))
    assert good.result(WAIT_S).text == "B"


def test_an_error_of_the_runtime_names_the_argument(make: Make) -> None:
    executor, _ = make(lambda request: [failure(request, "context_length_exceeded", 400, "input_ids")])
    result = executor.generate_async([65])
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^prompt_token_ids: refused") as caught:
            result.result(WAIT_S)
        assert caught.value.param == "prompt_token_ids"
    executor.enqueue_request(GenerationRequest([65], query_token_ids=[66]))
    (response,) = executor.await_responses(timeout=WAIT_S)
    assert response.error_msg.startswith("input_token_ids: refused")
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_params: it is empty"):
        executor.generate_async([1], guided_decoding_params=StructuredOutputsParams(regex=""))


def test_an_iteration_delivers_what_came_before_the_error_and_then_the_error(make: Make) -> None:
    executor, _ = make(lambda request: [output(request, "ab"), failure(request, "lagged", 500)])
    result = executor.generate_async([1], streaming=True)
    with pytest.raises(RequestError):
        result.result(WAIT_S)
    partial = next(result)
    assert (partial.text, partial.finish_reason) == ("ab", None)
    with pytest.raises(RequestError, match="lagged"):
        next(result)
    assert list(result) == []


def test_abort_by_id_and_by_result_reach_the_ring_while_the_request_runs(make: Make) -> None:
    executor, ring = make()
    by_id, by_result = executor.generate_async([1]), executor.generate_async([2])
    executor.abort_request(by_id.request.id)
    by_result.abort()
    ring.wait_request(1)
    first, second = ring.requests
    # In one message or in two.
    ring.wait_for(lambda: sum(len(abort.handles) for abort in ring.aborts) == 2)
    assert [handle for abort in ring.aborts for handle in abort.handles] == [first.handle, second.handle]
    ring.send(output(first, "so far", finish=finish("abort")))
    final = by_id.result(WAIT_S)
    assert (final.text, final.finish_reason) == ("so far", "abort")


def test_aborting_what_has_ended_or_never_was_has_no_effect(make: Make) -> None:
    executor, ring = make(spell("a"))
    result = executor.generate_async([1])
    result.result(WAIT_S)
    for request_id in (result.request.id, 99, 0, -1, 1 << 64):
        executor.abort_request(request_id)
    asyncio.run(result.aclose())
    executor.generate([1], timeout=WAIT_S)
    assert ring.aborts == []


def test_the_end_of_the_runtime_reaches_every_waiting_caller(make: Make) -> None:
    executor, ring = make()
    results = [executor.generate_async([1], streaming=True) for _ in range(20)]
    caught: list[BaseException] = []

    def wait(number: int) -> None:
        try:
            list(results[number]) if number % 2 else results[number].result()
        except RingClosed as error:
            caught.append(error)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    ring.wait_request(19)
    words = "worker: the process was killed by SIGKILL"
    Endpoints(ring.run_dir).state_file.write_text(json.dumps({"state": "failed", "error": words}))
    ring.set_state("launcher", "failed")
    for thread in threads:
        thread.join(WAIT_S)
    assert [str(error).endswith(f"it has failed: {words}") for error in caught] == [True] * 20
    assert all(result.done for result in results)
    for call in (lambda: executor.generate_async([1]), executor.get_latest_stats, executor.await_responses):
        with pytest.raises(RingClosed, match=words):
            call()
    assert str(executor.error).endswith(words)


def test_shutdown_ends_what_is_in_flight_and_every_later_call(make: Make) -> None:
    executor, ring = make()
    result = executor.generate_async([1])
    ring.wait_request()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RingClosed, match="shut down"):
        result.result(0)
    assert ring.wait_abort().client == CLIENT_ID
    for call in (lambda: executor.generate_async([1]), executor.get_latest_stats, executor.await_responses):
        with pytest.raises(RingClosed):
            call()


def test_stats_are_the_schedulers_newest_word(make: Make) -> None:
    executor, ring = make()
    stats = executor.get_latest_stats()
    assert stats is not None
    assert (stats.num_active_requests, stats.num_queued_requests) == (0, 0)
    status = ring.status.read("scheduler")
    ring.status.write(
        "scheduler", status._replace(num_running=4, num_waiting=6, num_received=10, batch_size=3)
    )
    stats = executor.get_latest_stats()
    assert stats is not None
    assert (stats.num_active_requests, stats.num_queued_requests, stats.num_received_requests) == (4, 6, 10)
    assert stats.current_batch_size == 3
    ring.set_state("scheduler", "absent")
    assert executor.get_latest_stats() is None


def test_a_task_that_stops_waiting_for_statistics_leaves_no_thread_waiting(tmp_path: Path) -> None:
    """A loop ends when the threads that it has started do, and here nothing would ever come."""
    ring = FakeRing(tmp_path, say_nothing)
    ring.answers_questions = False

    async def main() -> list[str]:
        with GenerationExecutor.create(run_dir=tmp_path) as executor:
            waiting = asyncio.ensure_future(anext(executor.aget_stats()))
            while not ring.arrivals:
                await asyncio.sleep(0.001)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncio")]

    names = asyncio.run(main())
    ring.close()
    assert names == []
