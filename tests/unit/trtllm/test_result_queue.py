"""GenerationResult.queue: responses of one request, from threads and event loops."""

from __future__ import annotations

import asyncio
import queue
import threading

import pytest

from carousel.trtllm.generation_result import GenerationResult
from runtime.base.errors import RequestError
from tests.unit.trtllm.test_generation_output import put, result_of

LONG_S = 60.0


def drained(result: GenerationResult) -> str:
    """The text of all responses that are there or come; the last of them is final."""
    text = ""
    while True:
        response = result.queue.get(timeout=LONG_S)
        text += response.result.text
        if response.is_final:
            return text


def test_responses_come_in_order_and_once() -> None:
    result, mailbox = result_of()
    assert result.queue.empty()
    with pytest.raises(queue.Empty):
        result.queue.get_nowait()
    with pytest.raises(queue.Empty):
        result.queue.get(timeout=0.01)
    put(mailbox, 0, "ab")
    assert result.queue.qsize() == 1
    assert result.queue.get_nowait().result.output_token_ids == [[0, 1]]
    put(mailbox, 2, "c", is_end=True)
    assert drained(result) == "c"
    assert result.done
    with pytest.raises(queue.Empty):
        result.queue.get()  # at once: nothing will come


def test_an_error_is_the_final_response() -> None:
    result, mailbox = result_of()
    put(mailbox, 0, "a")
    mailbox.put(RequestError("too bad", code="x"))
    assert result.queue.get().result.text == "a"
    response = result.queue.get()
    assert (response.has_error(), response.error_msg, response.is_final) == (True, "too bad", True)
    with pytest.raises(queue.Empty):
        result.queue.get_nowait()


def test_an_iteration_and_the_queue_take_from_the_same() -> None:
    result, mailbox = result_of()
    put(mailbox, 0, "a")
    assert next(result).text_diff == "a"
    put(mailbox, 1, "b", is_end=True)
    assert drained(result) == "b"
    assert list(result) == []


def test_a_thread_waits_until_something_comes() -> None:
    result, mailbox = result_of()
    texts: list[str] = []
    waiter = threading.Thread(target=lambda: texts.append(drained(result)))
    waiter.start()
    put(mailbox, 0, "a")
    put(mailbox, 1, "b", is_end=True)
    waiter.join(LONG_S)
    assert texts == ["ab"]


def test_two_event_loops_share_one_queue_and_a_cancelled_wait_takes_nothing() -> None:
    result, mailbox = result_of()

    async def first() -> str:
        with pytest.raises(queue.Empty):
            await result.queue.get_async(timeout=0.01)
        waiting = asyncio.create_task(result.queue.get_async())
        await asyncio.sleep(0.01)
        waiting.cancel()
        threading.Timer(0.01, put, (mailbox, 0, "a")).start()
        return (await result.queue.get_async(timeout=LONG_S)).result.text

    async def second() -> str:
        threading.Timer(0.01, put, (mailbox, 1, "b"), {"is_end": True}).start()
        text = (await result.queue.get_async()).result.text
        with pytest.raises(queue.Empty):
            await result.queue.get_async()
        return text

    assert asyncio.run(first()) + asyncio.run(second()) == "ab"
