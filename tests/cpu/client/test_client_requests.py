"""Requests with several sequences, options and labels, through Client and AsyncClient over a fake ring."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from carousel import AsyncClient, Client, InvalidRequest, RingClosed, SamplingParams
from runtime.wire.handle import sibling
from runtime.wire.messages import GenerateRequest, SequenceOutput, TensorBatch, TensorEntry
from tests.harness.ring.fake_ring import WAIT_S, FakeRing, failure, fake_ring, finish, output, say_nothing
from tests.harness.ring.launched import wait_until

CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]


def letters(request: GenerateRequest) -> list[SequenceOutput]:
    """Sequence i says its letter i + 1 times, and then ends; the sequences take turns."""
    num_sequences = request.sampling.n
    said = [
        output(request, chr(97 + index), index=index)
        for turn in range(num_sequences)
        for index in range(turn, num_sequences)
    ]
    return said + [
        output(request, "", index=index, finish=finish("length", index + 1)) for index in range(num_sequences)
    ]


def count_only(request: GenerateRequest) -> list[SequenceOutput]:
    return [output(request, "ab", index=index, finish=finish()) for index in range(request.sampling.n)]


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[FakeRing]:
    with fake_ring(tmp_path, letters) as ring:
        yield ring


@pytest.fixture
def client(ring: FakeRing) -> Iterator[Client]:
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        yield client


def test_a_completion_has_n_outputs_in_order(client: Client, ring: FakeRing) -> None:
    completion = client.generate("x", SamplingParams(n=3), timeout=WAIT_S)
    assert [each.text for each in completion.outputs] == ["a", "bb", "ccc"]
    assert [each.index for each in completion.outputs] == [0, 1, 2]
    assert completion.usage.completion_tokens == 6
    assert len(ring.requests) == 1
    assert ring.requests[0].sampling.n == 3


def test_a_stream_gives_the_deltas_of_all_sequences_and_ends_with_the_last(client: Client) -> None:
    texts = [""] * 4
    ends = []
    stream = client.stream("x", SamplingParams(n=4), timeout=WAIT_S)
    for delta in stream:
        texts[delta.index] += delta.text
        if delta.finish_reason is not None:
            ends.append(delta.index)
            assert delta.usage is not None
            assert delta.usage.completion_tokens == delta.index + 1
    assert texts == ["a", "bb", "ccc", "dddd"]
    assert sorted(ends) == [0, 1, 2, 3]
    assert next(stream, None) is None
    assert stream.state.completion().usage.completion_tokens == 10


def test_an_asynchronous_stream_does_the_same(ring: FakeRing) -> None:
    async def main() -> None:
        async with AsyncClient(ring.run_dir, connect_timeout=WAIT_S) as client:
            texts = [""] * 4
            async for delta in client.stream("x", SamplingParams(n=4), timeout=WAIT_S):
                texts[delta.index] += delta.text
            assert texts == ["a", "bb", "ccc", "dddd"]
            completion = await client.generate("x", SamplingParams(n=2), timeout=WAIT_S)
            assert [each.text for each in completion.outputs] == ["a", "bb"]

    asyncio.run(main())


def test_best_of_is_chosen_here(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        scores = [-4.0, -1.0, -2.0, -8.0]
        return [
            output(
                request,
                str(index),
                index=index,
                logprobs=np.array([score], np.float32).tobytes(),
                finish=finish(cumulative_logprob=score, completion_tokens=1),
            )
            for index, score in enumerate(scores)
        ]

    with fake_ring(tmp_path, answer) as ring, Client(tmp_path) as client:
        completion = client.generate("x", SamplingParams(n=2, best_of=4), timeout=WAIT_S)
        assert [(each.index, each.text) for each in completion.outputs] == [(0, "1"), (1, "2")]
        assert completion.usage.completion_tokens == 4
        assert completion.logprobs == []
        assert ring.requests[0].sampling.n == 4
        with pytest.raises(InvalidRequest) as caught:
            client.stream("x", SamplingParams(n=2, best_of=4))
        assert caught.value.param == "best_of"
        client.server_info()
        assert len(ring.requests) == 1


def test_an_error_of_one_sequence_ends_the_request_and_aborts_the_others(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [
            output(request, "a"),
            output(request, "c", index=2, finish=finish()),
            failure(request, "lagged", 500, index=1),
        ]

    with fake_ring(tmp_path, answer) as ring, Client(tmp_path) as client:
        with pytest.raises(Exception, match="lagged"):
            client.generate("x", SamplingParams(n=4), label="mine", timeout=WAIT_S)
        handle = ring.requests[0].handle
        assert sorted(ring.wait_abort().handles) == [handle, sibling(handle, 3)]
        assert not client._session.num_in_flight
        ring.answer = count_only
        assert client.generate("x", label="mine", timeout=WAIT_S).text == "ab"


def test_a_refusal_of_all_sequences_at_once_aborts_none(tmp_path: Path) -> None:
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        stream = client.stream("x", SamplingParams(n=3), timeout=WAIT_S)
        request = ring.wait_request()
        ring.send(*(failure(request, "invalid_value", 400, index=index) for index in range(3)))
        with pytest.raises(InvalidRequest):
            next(stream)
        client.server_info()
        assert ring.aborts == []


def test_an_abort_names_the_sequences_that_go_on(tmp_path: Path) -> None:
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        stream = client.stream("x", SamplingParams(n=3), timeout=WAIT_S)
        request = ring.wait_request()
        ring.send(output(request, "b", index=1, finish=finish()))
        assert next(stream).index == 1
        client.abort(stream)
        assert sorted(ring.wait_abort().handles) == [request.handle, sibling(request.handle, 2)]
        ring.send(*(output(request, "", index=index, finish=finish("abort")) for index in (0, 2)))
        assert [(delta.index, delta.finish_reason) for delta in stream] == [(0, "abort"), (2, "abort")]


def test_dropping_a_stream_aborts_all_its_sequences(tmp_path: Path) -> None:
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        stream = client.stream("x", SamplingParams(n=2))
        handle = ring.wait_request().handle
        del stream
        gc.collect()
        assert sorted(ring.wait_abort().handles) == [handle, sibling(handle, 1)]


def test_the_end_of_the_ring_ends_a_request_once(tmp_path: Path) -> None:
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        stream = client.stream("x", SamplingParams(n=3), timeout=WAIT_S)
        ring.wait_request()
        ring.set_state("launcher", "failed")
        with pytest.raises(RingClosed):
            next(stream)
        assert next(stream, None) is None
        assert stream._mailbox._items.empty()


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "timeout"])
def test_every_finish_reason_comes_through(tmp_path: Path, reason: str) -> None:
    with (
        fake_ring(tmp_path, lambda request: [output(request, "ab", finish=finish(reason))]),
        Client(tmp_path) as client,
    ):
        completion = client.generate("x", time_limit=0.2, timeout=WAIT_S)
        assert (completion.finish_reason, completion.text) == (reason, "ab")


def test_options_reach_the_wire(client: Client, ring: FakeRing) -> None:
    before = time.time()
    client.generate("x", time_limit=0.2, priority=3, timeout=WAIT_S)
    client.generate(
        CHAT,
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
        arrival_time=5.0,
        timeout=WAIT_S,
    )
    text, chat = ring.requests
    assert (text.time_limit_ms, text.priority) == (200, 3)
    assert before <= text.arrival_time <= time.time()
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    assert msgspec.msgpack.decode(chat.template_kwargs) == {"enable_thinking": False}
    assert chat.arrival_time == 5.0


def test_a_label_in_flight_is_refused_and_its_request_goes_on(tmp_path: Path) -> None:
    with fake_ring(tmp_path, say_nothing) as ring, Client(tmp_path) as client:
        stream = client.stream("x", label="mine", timeout=WAIT_S)
        request = ring.wait_request()
        with pytest.raises(InvalidRequest) as caught:
            client.generate("y", label="mine")
        assert (caught.value.code, caught.value.param) == ("duplicate_label", "label")
        ring.send(output(request, "a"))
        assert next(stream).text == "a"
        assert len(ring.requests) == 1
        other = client.stream("z", label="other", timeout=WAIT_S)
        ring.send(output(request, "b", finish=finish()), output(ring.wait_request(1), "c", finish=finish()))
        assert [delta.text for delta in other] == ["c"]
        # The final of the first one has come, though nobody has read it.
        again = client.stream("w", label="mine", timeout=WAIT_S)
        assert [delta.text for delta in stream] == ["b"]
        assert stream.state.completion().label == "mine"
        again.close()


def test_no_label_is_no_label(client: Client) -> None:
    streams = [client.stream("x", label="", timeout=WAIT_S) for _ in range(2)]
    assert ["".join(delta.text for delta in stream) for stream in streams] == ["a", "a"]


@pytest.mark.parametrize("way", ["close", "error", "abort", "unsendable"])
def test_a_label_is_free_again_whichever_way_its_request_ends(tmp_path: Path, way: str) -> None:
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        if way == "unsendable":
            with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
                client.stream("\ud800", label="mine")
        else:
            stream = client.stream("x", SamplingParams(n=2), label="mine", timeout=WAIT_S)
            request = ring.wait_request()
            if way == "close":
                stream.close()
            elif way == "error":
                ring.send(failure(request, "lagged", 500))
                with pytest.raises(Exception, match="lagged"):
                    next(stream)
            else:
                client.abort(stream)
                ring.send(*(output(request, "", index=i, finish=finish("abort")) for i in range(2)))
                assert [delta.finish_reason for delta in stream] == ["abort"] * 2
        ring.answer = count_only
        assert client.generate("y", label="mine", timeout=WAIT_S).label == "mine"


def test_threads_that_want_one_label_get_it_one_after_the_other(tmp_path: Path) -> None:
    with fake_ring(tmp_path, count_only), Client(tmp_path) as client:
        outcomes: list[str] = []

        def call() -> None:
            for _ in range(30):
                try:
                    client.generate("x", label="mine", timeout=WAIT_S)
                    outcomes.append("done")
                except InvalidRequest as error:
                    outcomes.append(error.code)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(outcomes) == 120
        assert set(outcomes) <= {"done", "duplicate_label"}
        assert client.generate("x", label="mine", timeout=WAIT_S).text == "ab"
        assert not client._session._labels


def test_logits_come_in_frames_behind_their_description(tmp_path: Path) -> None:
    context = np.arange(20, dtype=np.float32).reshape(4, 5)
    generated = -np.ones((2, 5), np.float32)
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        params = SamplingParams(return_context_logits=True, return_generation_logits=True)
        stream = client.stream("x", params, timeout=WAIT_S)
        request = ring.wait_request()
        for start in (0, 2):
            entry = TensorEntry(request.handle, "context_logits", "float32", (2, 5), start)
            unknown = TensorEntry(b"\0" * 16, "context_logits", "float32", (2, 5), start)
            part = context[start : start + 2].tobytes()
            ring.send_message(TensorBatch((entry, unknown)), [part, part])
        entry = TensorEntry(request.handle, "generation_logits", "float32", (2, 5), 0)
        ring.send_message(TensorBatch((entry,)), [generated.tobytes()])
        ring.send_message(TensorBatch((entry,)), [])  # a frame is missing: dropped, as everything malformed
        ring.send(output(request, "ab", finish=finish()))
        assert [delta.text for delta in stream] == ["ab"]
        completion = stream.state.completion()
        assert completion.context_logits is not None
        np.testing.assert_array_equal(completion.context_logits, context)
        assert completion.outputs[0].generation_logits is not None
        np.testing.assert_array_equal(completion.outputs[0].generation_logits, generated)


def test_numbers_of_requests_go_beyond_what_any_run_will_use(client: Client, ring: FakeRing) -> None:
    client._session._request_numbers = iter(range((1 << 40) - 2, 1 << 40))  # type: ignore[assignment]
    for _ in range(2):
        assert client.generate("x", SamplingParams(n=2), timeout=WAIT_S).outputs[1].text == "bb"
    assert len({request.handle for request in ring.requests}) == 2


def test_streams_that_the_collector_drops_in_any_thread_leave_nothing_behind(tmp_path: Path) -> None:
    def first_words(request: GenerateRequest) -> list[SequenceOutput]:
        return [output(request, "a", index=index) for index in range(request.sampling.n)]

    with fake_ring(tmp_path, first_words) as ring, Client(tmp_path) as client:

        def call(name: str) -> None:
            for number in range(25):
                stream = client.stream("x", SamplingParams(n=2), label=f"{name}{number}", timeout=WAIT_S)
                next(stream)
                stream.itself = stream  # type: ignore[attr-defined]

        threshold = gc.get_threshold()
        gc.set_threshold(20)
        try:
            threads = [threading.Thread(target=call, args=(name,)) for name in "abcd"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
        finally:
            gc.set_threshold(*threshold)

        def is_all_aborted() -> bool:
            gc.collect()  # does nothing while a collection runs in another thread
            return len(ring.aborted()) == 200

        wait_until(is_all_aborted, WAIT_S, "every stream is collected and aborted")
        session = client._session
        assert (list(session._requests), session.num_in_flight, len(session._labels)) == ([], 0, 0)
