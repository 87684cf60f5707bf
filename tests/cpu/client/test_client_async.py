"""AsyncClient against a fake ring: results, cancellation, and one wake-up per batch."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from carousel import (
    AsyncClient,
    AsyncResultStream,
    InvalidRequest,
    LoraConfig,
    PromptTuningConfig,
    RequestAborted,
    RequestError,
    RingClosed,
    SamplingParams,
)
from runtime.wire.messages import ControlReply, ControlRequest, GenerateRequest, SequenceOutput
from tests.harness.ring.fake_ring import (
    CLIENT_ID,
    WAIT_S,
    FakeRing,
    failure,
    fake_ring,
    finish,
    output,
    say_nothing,
    spell,
)

NUM_ATTEMPTS = 200
"""Attempts to connect, of which each takes 0.05 s at most: the machine may be busy."""


@pytest.fixture(autouse=True)
def _short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carousel.client.core.ring_state.TICK_S", 0.01)


def run(
    run_dir: Path,
    answer: Callable[[GenerateRequest], list[SequenceOutput]],
    test: Callable[[AsyncClient, FakeRing], Awaitable[None]],
) -> None:
    """Run `test` in a loop of its own, with a connected client."""

    async def main(ring: FakeRing) -> None:
        async with asyncio.timeout(WAIT_S), AsyncClient(run_dir, connect_timeout=WAIT_S) as client:
            await test(client, ring)

    with fake_ring(run_dir, answer) as ring:
        asyncio.run(main(ring))


def one_letter(request: GenerateRequest) -> list[SequenceOutput]:
    return [output(request, "a")]


def test_generate_and_stream_agree(tmp_path: Path) -> None:
    async def test(client: AsyncClient, _: FakeRing) -> None:
        completion = await client.generate("x", SamplingParams(max_tokens=3))
        deltas = [delta async for delta in client.stream("x", SamplingParams(max_tokens=3))]
        assert completion.text == "".join(delta.text for delta in deltas) == "abc"
        assert deltas[-1].usage == completion.usage

    run(tmp_path, spell("abc"), test)


def test_many_at_once_get_their_own_answers(tmp_path: Path) -> None:
    async def test(client: AsyncClient, _: FakeRing) -> None:
        calls = [client.generate(f"prompt {number}") for number in range(200)]
        answers = await asyncio.gather(*calls)
        assert [each.text for each in answers] == [f"prompt {number}" for number in range(200)]

    run(tmp_path, lambda request: [output(request, str(request.text), finish=finish())], test)


def test_a_batch_of_outputs_costs_one_wake_up_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        calls = [asyncio.create_task(client.generate("x")) for _ in range(20)]
        await asyncio.to_thread(ring.wait_request, 19)
        loop = asyncio.get_running_loop()
        num_wake_ups, wake_up = 0, loop.call_soon_threadsafe

        def count(*args: Any, **kw: Any) -> Any:
            nonlocal num_wake_ups
            num_wake_ups += 1
            return wake_up(*args, **kw)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        ring.send(*(output(request, "a", finish=finish()) for request in ring.requests))
        await asyncio.gather(*calls)
        assert num_wake_ups == 1

    run(tmp_path, lambda request: [], test)


def test_a_reader_that_lags_gets_what_has_piled_up_as_one_delta(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        stream = client.stream("x")
        assert (await anext(stream)).text == "a"
        for text in "bcd":
            ring.send(output(ring.requests[0], text))
        ring.send(output(ring.requests[0], "e", finish=finish()))
        await client.server_info()  # by its answer everything before it has arrived
        (rest,) = [delta async for delta in stream]
        assert rest.text == "bcde"
        assert rest.finish_reason == "stop"

    run(tmp_path, one_letter, test)


def test_cancelling_generate_aborts_the_request(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        call = asyncio.create_task(client.generate("x"))
        request = await asyncio.to_thread(ring.wait_request)
        call.cancel()
        abort = await asyncio.to_thread(ring.wait_abort)
        assert abort.handles == (request.handle,)
        assert call.cancelled()

    run(tmp_path, lambda request: [], test)


def test_callers_that_leave_together_share_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, all_have_left = os.eventfd_read, threading.Event()

    def read_when_all_have_left(fd: int) -> int:
        """The I/O thread takes what there is whenever it gets its turn: here, after the last of them."""
        all_have_left.wait()
        return read(fd)

    async def test(client: AsyncClient, ring: FakeRing) -> None:
        calls = [asyncio.create_task(client.generate("x")) for _ in range(100)]
        requests = await asyncio.to_thread(ring.wait_for, lambda: ring.requests[99:] and ring.requests)
        monkeypatch.setattr(os, "eventfd_read", read_when_all_have_left)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        all_have_left.set()
        handles = [request.handle for request in requests]
        await asyncio.to_thread(ring.wait_for, lambda: len(ring.aborted()) == len(calls))
        assert sorted(ring.aborted()) == sorted(handles)
        assert len(ring.aborts) <= 2

    run(tmp_path, lambda request: [], test)


def test_breaking_out_of_async_for_aborts_the_request(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        async for _ in client.stream("x"):
            break
        abort = await asyncio.to_thread(ring.wait_abort)
        assert abort.handles == (ring.requests[0].handle,)

    run(tmp_path, one_letter, test)


def test_a_timeout_aborts_the_request(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        with pytest.raises(TimeoutError, match="time limit"):
            await client.generate("x", timeout=0.02)
        await asyncio.to_thread(ring.wait_abort)

    run(tmp_path, one_letter, test)


def test_an_explicit_abort_delivers_the_rest(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        stream = client.stream("x")
        await anext(stream)
        client.abort(stream)
        handle = (await asyncio.to_thread(ring.wait_abort)).handles[0]
        ring.send(SequenceOutput(handle, finish=finish("abort")))
        assert [delta.finish_reason async for delta in stream] == ["abort"]

    run(tmp_path, one_letter, test)


def test_an_error_on_the_wire_is_raised_where_it_is_awaited(tmp_path: Path) -> None:
    async def test(client: AsyncClient, _: FakeRing) -> None:
        with pytest.raises(InvalidRequest, match="refused"):
            await client.generate("x")

    run(tmp_path, lambda request: [failure(request, "invalid_value", 400)], test)


def test_every_waiter_ends_when_the_ring_is_gone(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        calls = [asyncio.create_task(client.generate("x")) for _ in range(3)]
        await asyncio.to_thread(ring.wait_request, 2)
        ring.set_state("launcher", "failed")
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [RingClosed] * 3
        assert not client.is_connected
        with pytest.raises(RingClosed):
            await client.generate("y")

    run(tmp_path, lambda request: [], test)


@pytest.mark.parametrize("has_connected", [True, False])
def test_a_call_after_the_end_keeps_no_frames_of_the_calls_before_it(
    tmp_path: Path, has_connected: bool
) -> None:
    async def main(ring: FakeRing) -> None:
        client = AsyncClient(tmp_path, connect_timeout=WAIT_S if has_connected else 0.05)
        ring.shakes_hands = has_connected
        if has_connected:
            await client.connect()
            ring.set_state("launcher", "failed")
        depths = []
        for _ in range(4):
            with pytest.raises(RingClosed) as raised:
                await client.generate("x", timeout=WAIT_S)
            depths.append(len(raised.traceback))
        assert depths[1] == depths[2] == depths[3]
        await client.aclose()

    with fake_ring(tmp_path, say_nothing) as ring:
        asyncio.run(main(ring))


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_client_whose_server_was_still_loading_may_try_again_unless_it_was_closed(
    tmp_path: Path, is_closed: bool
) -> None:
    """Before, each later call reported that the server had not answered, though it was ready by then."""

    async def main(ring: FakeRing) -> None:
        client = AsyncClient(tmp_path, connect_timeout=0.05)
        ring.shakes_hands = False
        with pytest.raises(RingClosed, match="may still be loading"):
            await client.connect()
        ring.shakes_hands = True
        if is_closed:
            await client.aclose()
            with pytest.raises(RingClosed, match="may still be loading"):
                await client.generate("x")
            return
        for _ in range(NUM_ATTEMPTS):
            if not client.is_connected:
                with contextlib.suppress(RingClosed):
                    await client.connect()
        async with asyncio.timeout(WAIT_S):
            assert [each.text for each in await asyncio.gather(*map(client.generate, "xy"))] == ["a", "a"]
        await client.aclose()

    with fake_ring(tmp_path, spell("a")) as ring:
        asyncio.run(main(ring))


def test_closing_gives_the_waiters_the_error_of_the_caller(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        call = asyncio.create_task(client.generate("x"))
        await asyncio.to_thread(ring.wait_request)
        await client.aclose(InvalidRequest("enough"))
        with pytest.raises(InvalidRequest, match="enough"):
            await call

    run(tmp_path, lambda request: [], test)


def test_closing_a_stream_ends_the_task_that_waits_for_it(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        stream = client.stream("x")
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(ring.wait_request)
        await stream.aclose()
        with pytest.raises(RequestAborted):
            await reader

    run(tmp_path, lambda request: [], test)


def test_a_stream_that_is_closed_while_its_client_connects_asks_for_nothing(tmp_path: Path) -> None:
    async def main(ring: FakeRing) -> None:
        async with asyncio.timeout(WAIT_S):
            client = AsyncClient(tmp_path, connect_timeout=WAIT_S)
            ring.lets_in.clear()
            stream = client.stream("closed")
            reader = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            assert not client.is_connected
            await stream.aclose()
            ring.lets_in.set()
            with pytest.raises(RequestAborted):
                await reader
            await client.generate("x")
            assert [request.text for request in ring.requests] == ["x"]
            await client.aclose()

    with fake_ring(tmp_path, spell("a")) as ring:
        asyncio.run(main(ring))


@pytest.mark.parametrize("end", ["aclose", "abort"])
def test_a_stream_that_is_closed_while_it_brings_weights_asks_for_nothing(tmp_path: Path, end: str) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        ring.answers_questions = False
        weights = {
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((1, 8), np.float32)
        }
        adapter = LoraConfig(1, weights, {"r": 1, "target_modules": ["up_proj"]})
        stream = client.stream("closed", lora_config=adapter)
        reader = asyncio.ensure_future(anext(stream))
        (_, asked), *_ = await asyncio.to_thread(ring.wait_for, lambda: ring.arrivals[:1])
        assert isinstance(asked, ControlRequest)
        assert asked.op == "put_adapter"
        if end == "abort":
            client.abort(stream)
        else:
            await stream.aclose()
        body = msgspec.Raw(msgspec.msgpack.encode({"is_resident": True}))
        ring.send_message(ControlReply(asked.client, asked.number, body))
        with pytest.raises(RequestAborted):
            await reader
        await client.generate("x")
        assert [request.text for request in ring.requests] == ["x"]

    run(tmp_path, spell("a"), test)


def test_vectors_that_are_not_taken_in_are_named_and_a_limit_of_the_caller_is_his(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        ring.answers_questions = False
        options: Any = {"prompt_tuning_config": PromptTuningConfig(np.ones((1, 8), np.float32))}
        with pytest.raises(RequestError, match=r"prompt_tuning_config: .* within 0\.05 s"):
            await client.generate([1], **options)
        with pytest.raises(TimeoutError, match="time limit of the call"):
            await client.generate([1], timeout=0.02, **options)
        assert not ring.requests

    monkeypatch.setattr("carousel.client.core.puts.PATIENCE_S", 0.05)
    run(tmp_path, spell("a"), test)


def test_a_stream_that_ended_before_its_request_did_has_no_completion(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        aborted = client.submit("x")
        aborted.abort()
        with pytest.raises(RequestAborted, match="before its end"):
            await aborted.completion()
        assert not ring.requests
        closed = client.stream("x")
        await anext(closed)
        await closed.aclose()
        with pytest.raises(RequestAborted, match="before its end"):
            await closed.completion()

    run(tmp_path, one_letter, test)


def test_a_second_reader_of_a_stream_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async def test(client: AsyncClient, ring: FakeRing) -> None:
        stream = client.stream("x")
        reader = asyncio.ensure_future(anext(stream))
        request = await asyncio.to_thread(ring.wait_request)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        ring.send(output(request, "a", finish=finish()))
        assert (await reader).text == "a"

    run(tmp_path, lambda request: [], test)


def test_a_client_is_refused_in_a_second_loop(tmp_path: Path) -> None:
    with fake_ring(tmp_path, spell("a")):
        client = AsyncClient(tmp_path)
        assert asyncio.run(client.generate("x", timeout=math.inf)).text == "a"
        with pytest.raises(RuntimeError, match="event loop"):
            asyncio.run(client.generate("x"))
        asyncio.run(client.aclose())


def test_a_stream_is_refused_in_a_second_loop(tmp_path: Path) -> None:
    """A task that waits in the second loop would never be woken."""
    streams: list[AsyncResultStream] = []

    async def begin(client: AsyncClient) -> None:
        streams.append(client.stream("x"))
        assert (await anext(streams[0])).text == "a"

    async def go_on() -> None:
        async with asyncio.timeout(WAIT_S):
            await anext(streams[0])

    with fake_ring(tmp_path, one_letter):
        client = AsyncClient(tmp_path)
        asyncio.run(begin(client))
        with pytest.raises(RuntimeError, match="a stream belongs to the event loop"):
            asyncio.run(go_on())


def test_a_loop_that_ends_without_closing_leaves_the_thread_unharmed(tmp_path: Path) -> None:
    async def main(client: AsyncClient) -> None:
        await client.connect()

    with fake_ring(tmp_path, one_letter) as ring:
        client = AsyncClient(tmp_path, connect_timeout=WAIT_S)
        asyncio.run(main(client))
        ring.set_state("launcher", "failed")
        assert client._session is not None
        connection: Any = client._session.connection
        connection._thread.join(WAIT_S)
        assert not connection._thread.is_alive()
        client._session.connection.close()


def test_a_client_whose_loop_was_closed_ends_by_itself_and_its_request_too(tmp_path: Path) -> None:
    """Before, its thread went on for ever and kept its request alive: the server heard its heartbeats."""
    kept: list[object] = []

    async def main(client: AsyncClient) -> None:
        stream = client.stream("x")
        kept.append(stream)  # or the collector would abort it
        await anext(stream)

    with fake_ring(tmp_path, one_letter) as ring:
        client = AsyncClient(tmp_path, connect_timeout=WAIT_S)
        asyncio.run(main(client))
        assert client._session is not None
        connection: Any = client._session.connection
        connection._thread.join(WAIT_S)
        assert not connection._thread.is_alive()
        assert ring.wait_abort().client == CLIENT_ID
        assert str(client.error) == "the event loop of the client was closed"


def test_a_client_may_ask_in_several_names_over_one_connection(tmp_path: Path) -> None:
    """A label is its tenant's: another one may use it at the same time."""

    async def test(client: AsyncClient, ring: FakeRing) -> None:
        bob = client.of_tenant("bob")
        streams = [each.stream("x", label="mine") for each in (client, bob)]
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.to_thread(ring.wait_request, 1)
        for each in (client, bob):
            with pytest.raises(InvalidRequest, match="label: a request labelled 'mine' is in flight"):
                await each.generate("x", label="mine")
        assert [request.tenant for request in ring.requests] == ["", "bob"]
        await bob.flush_cache()
        asked = [each for _, each in ring.arrivals if isinstance(each, ControlRequest)]
        assert [each.tenant for each in asked] == ["bob"]
        assert len(ring.hellos) == 1
        assert (client.num_in_flight, bob.num_in_flight) == (2, 2)
        for task in tasks:
            task.cancel()

    run(tmp_path, say_nothing, test)
