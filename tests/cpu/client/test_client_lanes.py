"""Several tokenizers and detokenizers behind one client: what goes where, and what comes from where."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from carousel import AsyncClient, Client, RingClosed, SamplingParams
from runtime.base.errors import InvalidRequest
from runtime.wire.format import Message
from runtime.wire.handle import client_of, split_handle
from runtime.wire.messages import (
    AbortRequest,
    ControlRequest,
    FromClient,
    GenerateRequest,
    OutputBatch,
    SequenceOutput,
)
from runtime.wire.transport import MessageCodec
from tests.harness.ring.fake_ring import EPOCH, WAIT_S, FakeRing, fake_ring, finish, output

NUM_TOKENIZERS = 3
NUM_DETOKENIZERS = 2


@pytest.fixture(autouse=True)
def _short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carousel.client.core.ring_state.TICK_S", 0.01)
    monkeypatch.setattr("carousel.client.core.ring_state.PING_S", 0.02)


def echo(request: GenerateRequest) -> list[SequenceOutput]:
    return [
        output(request, f"{request.text}.{index}", index=index, finish=finish())
        for index in range(request.sampling.n)
    ]


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[FakeRing]:
    with fake_ring(tmp_path, echo, num_tokenizers=NUM_TOKENIZERS, num_detokenizers=NUM_DETOKENIZERS) as ring:
        yield ring


@pytest.fixture
def client(ring: FakeRing) -> Iterator[Client]:
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        yield client


def test_requests_spread_over_lanes_and_tokenizers_and_come_back_right(
    client: Client, ring: FakeRing
) -> None:
    texts = [str(number) for number in range(60)]
    completions = client.generate(texts, SamplingParams(n=2), timeout=WAIT_S)
    assert [each.outputs[1].text for each in completions] == [f"{text}.1" for text in texts]
    lanes = Counter(client_of(request.handle) for request in ring.requests)
    assert lanes == {ring.client_id(lane): 60 // NUM_DETOKENIZERS for lane in range(NUM_DETOKENIZERS)}
    tokenizers = Counter(number for number, _ in ring.arrivals)
    assert tokenizers == dict.fromkeys(range(NUM_TOKENIZERS), 60 // NUM_TOKENIZERS)


def test_a_request_goes_to_the_tokenizer_of_its_number_and_its_abort_follows(
    client: Client, ring: FakeRing
) -> None:
    ring.answer = lambda _: []
    streams = [client.stream("x") for _ in range(2 * NUM_TOKENIZERS)]
    ring.wait_request(len(streams) - 1)
    for stream in streams[:NUM_TOKENIZERS]:
        client.abort(stream)
    del streams, stream
    gc.collect()
    ring.wait_for(lambda: len(ring.aborted()) == 3 * NUM_TOKENIZERS)
    for number, message in ring.arrivals:
        assert isinstance(message, GenerateRequest | AbortRequest)
        handles = (message.handle,) if isinstance(message, GenerateRequest) else message.handles
        assert {split_handle(handle)[1] % NUM_TOKENIZERS for handle in handles} == {number}


def test_closing_aborts_on_every_lane_by_every_tokenizer(ring: FakeRing) -> None:
    ring.answer = lambda _: []
    client = Client(ring.run_dir, connect_timeout=WAIT_S)
    stream = client.stream("x", timeout=WAIT_S)
    ring.wait_request()
    client.close()
    with pytest.raises(RingClosed):
        next(stream)
    ring.wait_for(lambda: len(ring.aborts) == NUM_TOKENIZERS * NUM_DETOKENIZERS)
    said = {
        (number, message.client) for number, message in ring.arrivals if isinstance(message, AbortRequest)
    }
    ids = [ring.client_id(lane) for lane in range(NUM_DETOKENIZERS)]
    assert said == {(number, each) for number in range(NUM_TOKENIZERS) for each in ids}


def test_control_calls_use_the_first_lane(client: Client, ring: FakeRing) -> None:
    for _ in range(3):
        assert client.server_info() == {"op": "server_info"}
    controls = [message for _, message in ring.arrivals if isinstance(message, ControlRequest)]
    assert {message.client for message in controls} == {ring.client_id(0)}


def test_every_lane_is_pinged_as_itself(client: Client, ring: FakeRing) -> None:
    ids = {ring.client_id(lane) for lane in range(NUM_DETOKENIZERS)}
    ring.wait_for(lambda: {ping.client for ping in ring.pings} == ids)


@pytest.mark.parametrize("lane", range(NUM_DETOKENIZERS))
def test_one_silent_lane_ends_the_connection(
    ring: FakeRing, monkeypatch: pytest.MonkeyPatch, lane: int
) -> None:
    ring.answer = lambda _: []
    other = ring.client_id(1 - lane)
    with Client(ring.run_dir, connect_timeout=WAIT_S, ring_timeout=0.2) as client:
        streams = [client.stream("x", timeout=WAIT_S) for _ in range(NUM_DETOKENIZERS)]
        request = next(
            request for request in map(ring.wait_request, range(2)) if client_of(request.handle) == other
        )
        ring.shakes_hands = False
        monkeypatch.setattr("carousel.client.core.ring_state.SILENCE_S", 0.2)

        def keep_the_other_alive() -> bool:
            ring._outbox.append((OutputBatch((output(request, "."),)), ()))
            return client._session.connection.error is not None

        ring.wait_for(keep_the_other_alive)
        for stream in streams:
            with pytest.raises(RingClosed, match="one that answers"):
                list(stream)


def test_a_lane_that_does_not_answer_is_an_error_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_ring(tmp_path, echo) as ring:
        tells_of_another = msgspec.structs.replace(ring._ack(0), num_detokenizers=2)
        monkeypatch.setattr(ring, "_ack", lambda _: tells_of_another)
        with pytest.raises(RingClosed, match=r"not answered within 0.1 s"):
            Client(tmp_path, connect_timeout=0.1)


def test_the_lanes_may_have_been_started_one_after_the_other(
    ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detokenizer that was replaced has a later epoch than the others."""
    ack, send = ring._ack, ring._send
    epochs = {lane: MessageCodec(FromClient, EPOCH + lane).header for lane in range(NUM_DETOKENIZERS)}
    monkeypatch.setattr(ring, "_ack", lambda lane: msgspec.structs.replace(ack(lane), epoch=EPOCH + lane))

    def send_from(lane: int, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        ring._from_client.header = epochs[lane]
        send(lane, message, frames)

    monkeypatch.setattr(ring, "_send", send_from)
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        for number in range(2 * NUM_DETOKENIZERS):
            assert client.generate(str(number), timeout=WAIT_S).text == f"{number}.0"


def test_an_asynchronous_client_uses_all_lanes(ring: FakeRing) -> None:
    async def main() -> None:
        async with AsyncClient(ring.run_dir, connect_timeout=WAIT_S) as client:
            calls = [client.generate(str(number), timeout=WAIT_S) for number in range(40)]
            answers = await asyncio.gather(*calls)
            assert [each.text for each in answers] == [f"{number}.0" for number in range(40)]

    asyncio.run(main())
    lanes = Counter(client_of(request.handle) for request in ring.requests)
    assert set(lanes.values()) == {40 // NUM_DETOKENIZERS}


def test_a_timeline_is_asked_of_every_detokenizer(client: Client, ring: FakeRing) -> None:
    ring.sampled = {"mine"}
    assert client.timeline("mine") == [{"label": "mine", "lane": lane} for lane in range(NUM_DETOKENIZERS)]
    assert client.timeline("other") == []
    for wrong in ("", "x" * 257):
        with pytest.raises(InvalidRequest, match="label: text of 1 to 256 characters"):
            client.timeline(wrong)


def test_a_timeline_is_asked_of_every_detokenizer_in_an_event_loop(ring: FakeRing) -> None:
    ring.sampled = {"mine"}

    async def ask() -> list[dict[str, object]]:
        # The only client: the ring of tests answers whoever was heard last.
        async with AsyncClient(ring.run_dir, connect_timeout=WAIT_S) as client:
            return await client.timeline("mine")

    assert len(asyncio.run(ask())) == NUM_DETOKENIZERS
