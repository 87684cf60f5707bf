"""tokenizer_proc.loop: nothing takes it long in one piece, and what is left to threads comes to an end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.base.wake import Wake
from runtime.ring.tenants import OWNER
from runtime.wire.format import IntArray, pack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import AbortRequest, ChatMessage, GenerateRequest, TokenizedRequest
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import Waiter
from tests.harness.ring.tokenizer_ring import LONG_TEXT, MEDIUM_TEXT, Ring, handle, request
from tokenizer_proc import arrivals
from tokenizer_proc.arrivals import MAX_ENCODING_CHARS, MAX_PIECE_CHARS
from tokenizer_proc.long_texts import MAX_MEDIUM_CHARS
from tokenizer_proc.routes import MAX_TURN_BYTES

HELLO = (ChatMessage("user", "x"),)
USUAL_TEXT = "x" * 40_000
FULL_TEXT = "x" * MAX_PIECE_CHARS
MANY = SamplingParams(seed=1, n=100)


class Recorder:
    """Tokenizer with an id for every text. It notes what the loop's own thread has to encode and to render,
    and encodes medium and long texts of others only while its gate is open.
    """

    is_template_open = True

    def __init__(self, expansion: int = 1) -> None:
        """expansion: characters of a prompt for each of a message."""
        self.loop_thread = threading.get_ident()
        self.num_chars = 0
        """Number of characters that the loop's thread has encoded, or given to the template."""
        self.gate = threading.Event()
        self.gate.set()
        self.encoded: list[str] = []
        """First characters of the texts that other threads have encoded."""
        self._expansion = expansion

    def max_token_chars(self) -> None:
        return None

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        if threading.get_ident() == self.loop_thread:
            self.num_chars += sum(map(len, texts))
        else:
            assert self.gate.wait(20)
            self.encoded += [text[0] for text in texts]
        return [np.array([5], np.int32) for _ in texts]

    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> str:
        text = self._expansion * "".join(message["content"] for message in messages)
        if threading.get_ident() == self.loop_thread:
            self.num_chars += len(text) // self._expansion + len(str(options))
        return text


@contextmanager
def recorded(expansion: int = 1, **options: Any) -> Iterator[tuple[Ring, Recorder]]:
    tokenizer = Recorder(expansion)
    ring = Ring(tokenizer, **options)
    try:
        yield ring, tokenizer
    finally:
        tokenizer.gate.set()
        ring.loop.close()


def ask(tenant: str, seq: int, **fields: Any) -> GenerateRequest:
    client = 1 + sum(map(ord, tenant))
    return GenerateRequest(
        make_handle(client, seq), **{"sampling": SamplingParams(seed=1), **fields}, tenant=tenant
    )


def who(messages: Sequence[Any]) -> list[tuple[str, int]]:
    """Return the tenant and the number of each request among these messages."""
    sent = [message for message in messages if isinstance(message, TokenizedRequest)]
    return [(message.tenant, int.from_bytes(message.handle[8:12], "little")) for message in sent]


# -- the length of a turn ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"text": USUAL_TEXT},
        {"text": "x" * MAX_MEDIUM_CHARS},
        {"text": LONG_TEXT},
        {"text": FULL_TEXT},
        {"text": "x" * 3000},
        {"text": "x", "prediction": "y" * 60_000},
        {"input_ids": pack_ids([5]), "prediction": "y" * 60_000},
        {"text": "x", "sampling": SamplingParams(seed=1, bad_words=("w" * 255,) * 60)},
        {"messages": (ChatMessage("user", USUAL_TEXT),)},
        {"messages": (ChatMessage("user", "x"),) * 2000},
        {"messages": HELLO, "tools": msgspec.json.encode([{"a": "x" * 20_000}])},
        {"messages": HELLO, "template_kwargs": msgspec.msgpack.encode({"x": "x" * 5000})},
        {"messages": (ChatMessage("user", "x" * 2000),)},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_no_turn_encodes_more_than_its_share(fields: dict[str, Any]) -> None:
    """A turn encoded up to 131,072 characters, 84 ms for emojis, and a prediction in addition."""
    with recorded(expansion=6) as (ring, tokenizer):
        ring.send(*(request(seq, **fields) for seq in range(12)))
        received = []
        while True:
            tokenizer.num_chars = 0
            has_more = ring.loop.turn()
            assert tokenizer.num_chars <= MAX_PIECE_CHARS
            received += ring.scheduler.drain()
            if not has_more and not ring.loop.is_busy:
                break
            ring.wait_for_long()
        assert sorted(who(received)) == [(OWNER, seq) for seq in range(12)]


def test_what_a_template_makes_long_is_left_to_a_thread() -> None:
    with recorded(expansion=20) as (ring, tokenizer):
        tokenizer.gate.clear()
        ring.send(request(0, messages=(ChatMessage("user", "x" * 2000),)), request(1, text="x"))
        ring.loop.turn()
        assert who(ring.scheduler.drain()) == [(OWNER, 1)]
        assert ring.loop.num_encoding == 1
        tokenizer.gate.set()
        assert who(ring.finish()) == [(OWNER, 0)]


def test_what_many_sequences_take_to_send_is_spread_over_turns_in_order() -> None:
    """A hundred sequences with 65,536 ids are 26 MB, and took one turn of 31 ms."""
    with recorded(context_length=1 << 20) as (ring, _):
        ids = pack_ids([5] * (1 << 16))
        ring.send(request(0, input_ids=ids, sampling=MANY), AbortRequest((handle(0),)), request(1, text="x"))
        received = []
        while ring.loop.turn():
            part = ring.scheduler.drain()
            assert 0 < len(part) * len(ids) <= MAX_TURN_BYTES + len(ids)
            received += part
        received += ring.scheduler.drain()
        assert [type(message) for message in received] == [
            *[TokenizedRequest] * 100,
            AbortRequest,
            TokenizedRequest,
        ]


def test_a_turn_reads_only_so_many_bytes() -> None:
    with recorded(context_length=1 << 20) as (ring, _):
        ids = pack_ids([5] * (1 << 16))
        ring.send(*(request(seq, input_ids=ids) for seq in range(40)))
        num_received = [0]
        while ring.loop.num_received < 40:
            ring.loop.turn()
            num_received.append(ring.loop.num_received)
        assert max(np.diff(num_received)) <= 5
        assert len(ring.finish()) == 40


def test_a_large_text_is_read_in_one_turn_and_begun_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer_proc.loop.MUCH_CHARS", len(LONG_TEXT) - 1)
    with recorded(context_length=1 << 20) as (ring, tokenizer):
        tokenizer.gate.clear()
        ring.send(*(request(seq, text=LONG_TEXT) for seq in range(3)))
        work = [(0, 0)]
        while work[-1] != (3, 3):
            ring.loop.turn()
            work.append((ring.loop.num_received, ring.loop.num_encoding))
        assert not any(before[0] < now[0] and before[1] < now[1] for before, now in pairwise(work))
        tokenizer.gate.set()
        assert len(ring.finish()) == 3


def test_encoded_texts_are_passed_on_in_portions_and_let_others_through() -> None:
    with recorded() as (ring, tokenizer):
        tokenizer.gate.clear()
        ring.status = ring.status._replace(num_waiting=0)
        texts = [
            ask(f"t{number}", 0, text=MEDIUM_TEXT, sampling=SamplingParams(seed=1, n=8))
            for number in range(12)
        ]
        ring.send(*texts)
        ring.loop.turn()
        tokenizer.gate.set()
        ring.wait_for_long()
        ring.send(ask("bob", 0, text=FULL_TEXT))
        num_passed = []
        while True:
            has_more = ring.loop.turn()
            passed = Counter(tenant for tenant, _ in who(ring.scheduler.drain()))
            num_passed.append((passed.pop("bob", 0), passed.total()))
            if not has_more:
                break
        assert num_passed[0][0] == 1
        assert max(count for _, count in num_passed) < 12 * 8
        assert sum(count for _, count in num_passed) == 12 * 8


# -- medium texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", [OWNER, "alice"])
def test_a_flood_of_medium_texts_is_never_refused(tenant: str) -> None:
    with recorded() as (ring, tokenizer):
        tokenizer.gate.clear()
        ring.send(*(ask(tenant, seq, text=USUAL_TEXT) for seq in range(90)))
        while ring.loop.turn():
            pass
        most = MAX_ENCODING_CHARS // len(USUAL_TEXT) + 1
        assert ring.loop.num_encoding == most, "more are given to the threads than they need"
        tokenizer.gate.set()
        assert sorted(who(ring.finish())) == [(tenant, seq) for seq in range(90)]
        assert ring.refusals() == []
        assert (ring.loop.num_encoding, ring.loop.num_sent) == (0, 90)


def test_the_owners_medium_texts_stay_in_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_TENANT_CHARS", 2 * MAX_ENCODING_CHARS)
    with recorded() as (ring, tokenizer):
        tokenizer.gate.clear()
        ring.send(*(ask(OWNER, seq, text=USUAL_TEXT) for seq in range(90)))
        for _ in range(10):
            ring.loop.turn()
        assert ring.loop.is_blocked
        assert ring.loop.num_received < 60
        tokenizer.gate.set()
        assert sorted(who(ring.finish())) == [(OWNER, seq) for seq in range(90)]
        assert not ring.loop.is_blocked
        assert ring.refusals() == []


def test_what_threads_encode_counts_for_the_share_of_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_TENANT_CHARS", 200_000)
    monkeypatch.setattr(arrivals, "MAX_ENCODING_CHARS", 100_000)
    with recorded() as (ring, tokenizer):
        tokenizer.gate.clear()
        for seq in range(9):
            ring.send(ask("alice", seq, text=USUAL_TEXT))
            ring.loop.turn()
        while ring.loop.turn():
            pass
        assert ring.loop.num_encoding == 3
        tokenizer.gate.set()
        sent = who(ring.finish())
        # Those that are refused take a little of what is left.
        assert 4 <= len(sent) <= 5
        assert {refused.error.status for refused in ring.refusals()} == {429}


def test_medium_texts_of_one_hold_up_nobody_else_and_are_encoded_in_turn() -> None:
    with recorded() as (ring, tokenizer):
        tokenizer.gate.clear()
        ring.send(
            *(ask("alice", seq, text="a" + USUAL_TEXT) for seq in range(30)), ask("alice", 30, text="x")
        )
        while ring.loop.turn():
            pass
        ring.send(ask("bob", 0, text="x"), *(ask("bob", seq, text="b" + USUAL_TEXT) for seq in range(1, 4)))
        ring.loop.turn()
        assert who(ring.scheduler.drain()) == [("bob", 0)]
        tokenizer.gate.set()
        sent = who(ring.finish())
        assert len(sent) == 34
        order = "".join(tokenizer.encoded)
        # Two threads have begun with alice's.
        assert order.rindex("b") <= 8, order
        assert ring.refusals() == []


def test_below_the_bound_a_short_text_passes_medium_ones_of_its_tenant() -> None:
    with recorded() as (ring, tokenizer):
        tokenizer.gate.clear()
        ring.send(ask("alice", 0, text=USUAL_TEXT), ask("alice", 1, text="x"))
        ring.loop.turn()
        assert who(ring.scheduler.drain()) == [("alice", 1)]
        tokenizer.gate.set()
        assert who(ring.finish()) == [("alice", 0)]


def test_a_text_that_cannot_be_encoded_gives_its_place_back() -> None:
    class Broken(Recorder):
        def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
            super().encode_batch(texts)
            raise RuntimeError("no")

    tokenizer = Broken()
    ring = Ring(tokenizer)
    ring.send(*(ask("alice", seq, text=USUAL_TEXT) for seq in range(30)))
    assert ring.finish() == []
    assert len(ring.refusals()) == 30
    assert (ring.loop.num_encoding, ring.loop.num_sent) == (0, 0)
    ring.loop.close()


def test_aborts_of_a_held_tenant_follow_its_requests() -> None:
    with recorded() as (ring, tokenizer):
        tokenizer.gate.clear()
        requests = [ask("alice", seq, text=USUAL_TEXT) for seq in range(30)]
        handles = tuple(each.handle for each in requests)
        ring.send(*requests, AbortRequest(handles, tenant="alice"), AbortRequest(handles[:1]))
        while ring.loop.turn():
            pass
        tokenizer.gate.set()
        received = ring.finish()
        places: dict[bytes, int] = {}
        for place, message in enumerate(received):
            for each in message.handles if isinstance(message, AbortRequest) else ():
                places[each] = place
        for place, message in enumerate(received):
            if isinstance(message, TokenizedRequest):
                assert places[message.handle] > place


def test_a_wait_for_sockets_ends_when_a_text_is_encoded() -> None:
    wake = Wake()
    waiter = Waiter([wake.fd])
    with recorded(on_encoded=wake.set) as (ring, tokenizer):
        tokenizer.gate.clear()
        ring.send(ask("alice", 0, text=USUAL_TEXT))
        assert not ring.loop.turn()
        assert not ring.loop.is_blocked
        assert not waiter.wait(0.0)
        tokenizer.gate.set()
        assert waiter.wait(20)
        ring.wait_for_long()
        ring.loop.turn()
        assert who(ring.scheduler.drain()) == [("alice", 0)]
    wake.close()
