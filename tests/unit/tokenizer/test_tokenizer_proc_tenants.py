"""A tokenizer between tenants: what one of them sends holds up, refuses or ends nothing of another."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.ring.tenants import OWNER, Tenant, Tenants
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import IntArray, pack_ids
from runtime.wire.handle import make_handle, with_attempt
from runtime.wire.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    ErrorInfo,
    GenerateRequest,
    RequestFailed,
    TokenizedRequest,
)
from runtime.wire.plan import AdapterPiece
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessStatus
from tests.harness.cases import for_each
from tests.harness.ring.tokenizer_ring import LONG_TEXT, Ring
from tokenizer_proc import arrivals
from tokenizer_proc.adapters import AdapterTable, InlineAdapters
from tokenizer_proc.arrivals import (
    CHARS_PER_PIECE,
    CHARS_PER_SEQUENCE,
    CREDIT_OF_SEQUENCE,
    MAX_CREDIT,
    MAX_PIECE_CHARS,
    MAX_TENANT_PARTS,
    PRICE_OF_BAD_UPLOAD,
    cost_of,
)
from tokenizer_proc.long_texts import MAX_MEDIUM_CHARS, MAX_SHORTER_CHARS
from tokenizer_proc.receipt import Receipt

ALICE, BOB, HTTP = 11, 22, 33
FULL_TEXT = "x" * MAX_PIECE_CHARS
"""Longest text that the loop encodes by itself."""
IDS = pack_ids([5])
NOW = Receipt(1000.0, 2_000_000_000.0)


def ask(tenant: str, seq: int, client: int = 0, **fields: Any) -> GenerateRequest:
    client = client or {"alice": ALICE, "bob": BOB}[tenant]
    prompt = {} if "text" in fields else {"input_ids": IDS}
    return GenerateRequest(
        make_handle(client, seq), **{"sampling": SamplingParams(seed=1), **prompt, **fields}, tenant=tenant
    )


def passed(ring: Ring) -> list[tuple[str, int]]:
    """Return the tenant and the number of each request that has gone to the scheduler."""
    sent = [message for message in ring.scheduler.drain() if isinstance(message, TokenizedRequest)]
    return [(message.tenant, int.from_bytes(message.handle[8:12], "little")) for message in sent]


def refused(ring: Ring) -> dict[int, ErrorInfo]:
    """Return who was refused, by client."""
    return {int.from_bytes(each.handle[:8], "little"): each.error for each in ring.refusals()}


class Stepped(Tokenizer):
    """Encodes a long text when it is told to, and notes in which order."""

    def __init__(self, loaded: Tokenizer) -> None:
        super().__init__(loaded._backend, loaded._open_wrapper)
        self.order: list[str] = []
        self.began = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        if len(texts[0]) > MAX_MEDIUM_CHARS:
            self.order.append(texts[0][0])
            self.began.release()
            assert self.may_end.acquire(timeout=60)
            texts = ["x"]
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


@contextmanager
def stepped_ring(demo: Tokenizer) -> Iterator[tuple[Ring, Stepped]]:
    tokenizer = Stepped(demo)
    ring = Ring(tokenizer)
    try:
        yield ring, tokenizer
    finally:
        tokenizer.may_end.release(1000)
        ring.loop.close()


# -- waiting -------------------------------------------------------------------------------------------------


def test_texts_of_one_that_wait_to_be_encoded_are_waited_for_by_nobody_else(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.send(*(ask("alice", seq, text=FULL_TEXT) for seq in range(60)))
    ring.loop.turn()
    ring.send(ask("bob", 0, text="hello"))
    ring.loop.turn()
    sent = passed(ring)
    assert ("bob", 0) in sent
    assert len(sent) <= 5, "it waited for texts that others had sent"
    assert [seq for tenant, seq in sent if tenant == "alice"] == list(range(len(sent) - 1))


def test_a_flood_is_read_to_its_end_so_that_others_are_seen(demo: Tokenizer) -> None:
    """Reading had stopped until all that was read had been encoded: ten seconds of work."""
    ring = Ring(demo)
    for first in (0, 100):
        ring.send(*(ask("alice", first + seq, text=FULL_TEXT) for seq in range(100)))
        ring.loop.turn()
        assert ring.inbox.drain() == []
    assert len(passed(ring)) <= 6


def test_long_texts_are_encoded_in_turn(demo: Tokenizer) -> None:
    with stepped_ring(demo) as (ring, tokenizer):
        ring.send(*(ask("alice", seq, text="a" + LONG_TEXT) for seq in range(5)))
        ring.loop.turn()
        assert tokenizer.began.acquire(timeout=10)
        ring.send(*(ask("bob", seq, text="b" + LONG_TEXT) for seq in range(2)))
        ring.loop.turn()
        tokenizer.may_end.release(7)
        ring.wait_for_long()
        assert "".join(tokenizer.order) == "ababaaa"
        ring.loop.turn()
        sent = passed(ring)
        assert [seq for tenant, seq in sent if tenant == "alice"] == list(range(5))
        assert [seq for tenant, seq in sent if tenant == "bob"] == list(range(2))
        assert ring.loop.num_encoding == 0


def test_a_text_of_seconds_holds_up_no_shorter_one(demo: Tokenizer) -> None:
    with stepped_ring(demo) as (ring, tokenizer):
        ring.send(ask("alice", 0, text="a" + "x" * MAX_SHORTER_CHARS))
        while ring.loop.turn():
            pass
        assert tokenizer.began.acquire(timeout=10)
        ring.send(ask("bob", 0, text="b" + LONG_TEXT))
        ring.loop.turn()
        assert tokenizer.began.acquire(timeout=10), "it waits for the other one"
        assert tokenizer.order == ["a", "b"]


# -- refusals ------------------------------------------------------------------------------------------------


def test_whose_long_texts_are_too_many_is_refused_and_nobody_else(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MAX_TENANT_CHARS", 3 * cost_of(ask("alice", 0, text=LONG_TEXT)))
    with stepped_ring(demo) as (ring, _):
        ring.send(*(ask("alice", seq, text=LONG_TEXT) for seq in range(9)), ask("bob", 0, text=LONG_TEXT))
        while ring.loop.turn():
            pass
        errors = refused(ring)
        assert list(errors) == [ALICE]
        assert (errors[ALICE].status, errors[ALICE].code) == (429, "rate_limit_exceeded")
        assert errors[ALICE].retry_after_s > 0
        whose = [long.job.request.tenant for long in ring.loop._long]
        assert (whose.count("alice"), whose.count("bob")) == (3, 1)


def test_all_that_waits_is_bounded_and_the_next_tenant_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_TENANT_CHARS", 8_000)
    monkeypatch.setattr(arrivals, "MAX_ALL_CHARS", 20_000)
    waiting = arrivals.Arrivals()
    text = "x" * 900
    num_let_in = {}
    for client in range(1, 8):
        tenant = f"t{client}"
        for seq in range(40):
            waiting.add(ask(tenant, seq, client, text=text), NOW)
        cost = waiting._turns.cost_of(tenant)
        num_let_in[tenant] = sum(each.refusal is None for each in dict(waiting._turns.items())[tenant])
        assert cost <= 8_000 + 40 * 64
    assert num_let_in["t1"] == 8
    assert min(num_let_in.values()) >= 1
    assert sum(num_let_in.values()) * 964 <= 20_000 + 7 * 964


def test_what_is_made_again_after_a_restart_finds_more_room_and_is_bounded_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrivals, "MAX_TENANT_CHARS", 4_000)
    monkeypatch.setattr(arrivals, "MAX_ALL_CHARS", 16_000)
    waiting = arrivals.Arrivals()
    for seq in range(100):
        waiting.add(ask("alice", seq, text="x" * 936), NOW, is_again=True)
    ((_, items),) = waiting._turns.items()
    # Each refused one takes a little of what is left.
    assert 12 <= sum(each.refusal is None for each in items) <= 16


def test_more_than_may_wait_is_refused_and_more_than_can_be_refused_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrivals, "MAX_TENANT_MESSAGES", 10)
    monkeypatch.setattr(arrivals, "MAX_TENANT_REFUSALS", 20)
    waiting = arrivals.Arrivals()
    for seq in range(30):
        waiting.add(ask("alice", seq), NOW)
        waiting.add(AbortRequest(tenant="alice"), NOW)
    assert len(waiting) == 20
    assert "alice has 10 messages waiting" in caplog.text
    waiting.add(ask("bob", 0), NOW)
    assert len(waiting) == 21
    refused = [waiting.take().refusal is not None for _ in range(21)]
    assert sum(refused) == 10


def test_who_aborts_far_more_than_he_has_asked_for_is_not_listened_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One message aborts 4,096 sequences, for each of which the scheduler looks."""
    waiting = arrivals.Arrivals()

    def num_let_in(message: Any, count: int) -> int:
        before = len(waiting)
        for _ in range(count):
            waiting.add(message, NOW)
        return len(waiting) - before

    unknown = AbortRequest(tuple(make_handle(ALICE, seq) for seq in range(4096)), tenant="alice")
    assert num_let_in(unknown, 100) == arrivals.MAX_CREDIT // 4096
    assert num_let_in(AbortRequest(client=ALICE, tenant="alice"), 10) == 0
    assert "alice aborts far more" in caplog.text
    # Whatever became of its requests, it may abort each of them.
    assert num_let_in(ask("alice", 0, sampling=SamplingParams(seed=1, n=100)), 3) == 3
    assert num_let_in(AbortRequest((make_handle(ALICE, 0),), tenant="alice"), 1000) == 600
    assert num_let_in(AbortRequest(client=BOB, tenant="bob"), 1000) == arrivals.MAX_CREDIT // 256
    others = tuple(make_handle(HTTP, seq) for seq in range(4096))
    assert num_let_in(AbortRequest(others), 100) == 100, "the owner's are all believed"


def test_questions_that_are_refused_are_answered_as_long_as_that_is_no_flood(demo: Tokenizer) -> None:
    ring = Ring(demo)
    num_answers = 0
    for number in range(3000):
        ring.send(ControlRequest(ALICE, number, "server_info", tenant="alice"))
        ring.loop.turn()
        num_answers += len(ring.detokenizers[0].drain())
    assert num_answers == arrivals.MAX_CREDIT // 64
    assert ring.scheduler.drain() == []


def test_the_owners_surplus_waits_in_the_sockets(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_TENANT_CHARS", 10 * len(FULL_TEXT))
    monkeypatch.setattr("tokenizer_proc.loop.MAX_DRAIN", 20)
    ring = Ring(demo)
    ring.send(*(ask(OWNER, seq, HTTP, text=FULL_TEXT if seq < 20 else "x") for seq in range(60)))
    num_unread = []
    while ring.loop.turn() or ring.inbox._messages:
        num_unread.append(len(ring.inbox._messages))
    assert num_unread[:6] == [40] * 6, "read on although much of the owner's waits"
    assert ring.refusals() == []
    assert passed(ring) == [(OWNER, seq) for seq in range(60)]


def test_a_flood_of_requests_for_many_sequences_is_refused_in_portions(demo: Tokenizer) -> None:
    """Each is refused by a message for each sequence, which the detokenizer takes in its own pace."""
    ring = Ring(demo)
    ring.status = ProcessStatus(num_running=100, num_waiting=99)
    many = SamplingParams(seed=1, n=128)
    ring.send(*(ask("alice", seq, sampling=many) for seq in range(100)))
    ring.loop.turn()
    assert len(ring.refusals()) <= MAX_PIECE_CHARS // CHARS_PER_SEQUENCE
    ring.send(ask("bob", 0))
    ring.loop.turn()
    assert passed(ring) == [("bob", 0)]
    assert len(ring.refusals()) <= MAX_PIECE_CHARS // CHARS_PER_SEQUENCE


# -- the queue -----------------------------------------------------------------------------------------------


def test_a_flood_on_its_way_to_the_scheduler_has_nobody_else_refused(demo: Tokenizer) -> None:
    """The scheduler refuses what is over a tenant's share, but not before its next step."""
    ring = Ring(demo)
    ring.has_tenants = True
    ring.status = ProcessStatus(num_running=50, num_waiting=50)  # a hundred more may wait
    errors: dict[int, ErrorInfo] = {}
    for turn in range(40):
        for seq in range(100):
            ring.send(ask("alice", 100 * turn + seq))
        ring.send(ask("bob", turn))
        for _ in range(3):
            ring.loop.turn()
            errors.update(refused(ring))
        assert not ring.loop.is_busy
    sent = passed(ring)
    assert [seq for tenant, seq in sent if tenant == "bob"] == list(range(40))
    assert sum(tenant == "alice" for tenant, _ in sent) == 100
    assert list(errors) == [ALICE]
    assert (errors[ALICE].status, errors[ALICE].code) == (429, "rate_limit_exceeded")
    # The scheduler has received all that was sent, and refused sixty of alice's.
    ring.status = ProcessStatus(num_running=50, num_waiting=130, num_received=140)
    ring.send(*(ask("alice", seq) for seq in range(30)), ask("bob", 40))
    ring.loop.turn()
    sent = passed(ring)
    assert (sent.count(("bob", 40)), len(sent)) == (1, 21)


def test_a_tenant_is_not_told_what_others_have(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.has_tenants = True
    ring.status = ProcessStatus(num_running=87, num_waiting=113)
    ring.send(ask("bob", 0), ask(OWNER, 0, HTTP))
    ring.loop.turn()
    errors = refused(ring)
    assert {error.status for error in errors.values()} == {503}
    assert "200 sequences" in errors[HTTP].message
    assert not any(number in errors[BOB].message for number in ("87", "113", "200 "))


# -- aborts and questions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("abort", [AbortRequest((make_handle(HTTP, 3),)), AbortRequest(client=HTTP)])
def test_the_owners_abort_overtakes_no_tenants_request(demo: Tokenizer, abort: AbortRequest) -> None:
    """An HTTP server is one client, with requests of many tenants."""
    ring = Ring(demo)
    ring.send(*(ask("alice", seq, HTTP, text=FULL_TEXT) for seq in range(4)), abort)
    messages: list[Any] = []
    while ring.loop.turn():
        messages += ring.scheduler.drain()
    messages += ring.scheduler.drain()
    handles = [message.handle for message in messages if isinstance(message, TokenizedRequest)]
    assert handles == [make_handle(HTTP, seq) for seq in range(4)]
    behind = messages[messages.index(messages[-1]) :]
    assert isinstance(behind[0], AbortRequest)
    assert make_handle(HTTP, 3) in behind[0].handles
    assert behind[0].tenant == "alice"
    assert abort in messages


def test_the_owners_abort_follows_the_attempt_that_it_names() -> None:
    """The first attempt of a request is taken while the second one still waits."""
    waiting = arrivals.Arrivals()
    first = ask("alice", 3, HTTP)
    second = msgspec.structs.replace(first, handle=with_attempt(first.handle, 1))
    for each in (first, second):
        waiting.add(each, NOW)
    assert waiting.take().message is first
    waiting.add(AbortRequest((second.handle,)), NOW)
    left: list[Any] = [waiting.take().message for _ in range(len(waiting))]
    assert [each for each in left if each.tenant == "alice"] == [
        second,
        AbortRequest((second.handle,), tenant="alice"),
    ]


def test_an_abort_ends_no_long_text_of_another_tenants(demo: Tokenizer) -> None:
    with stepped_ring(demo) as (ring, tokenizer):
        ring.send(ask("alice", 0, text=LONG_TEXT))
        for abort in (AbortRequest((make_handle(ALICE, 0),)), AbortRequest(client=ALICE)):
            ring.send(msgspec.structs.replace(abort, tenant="bob"))
        ring.loop.turn()
        ring.scheduler.drain()
        tokenizer.may_end.release()
        ring.wait_for_long()
        ring.loop.turn()
        assert [type(message) for message in ring.scheduler.drain()] == [TokenizedRequest]


@for_each(
    ("role", "allowed"),
    [
        ("user", set()),
        ("metrics", {"server_info", "iteration_stats", "request_stats"}),
        ("admin", None),
        (OWNER, None),
    ],
)
def test_what_may_be_asked_of_the_ring_depends_on_the_role(
    demo: Tokenizer, role: Any, allowed: set[str] | None
) -> None:
    ring = Ring(demo)
    ring.tenants = Tenants(tuple(Tenant(name, name) for name in ("user", "metrics", "admin")))
    ops: Any = [
        "server_info",
        "flush_cache",
        "iteration_stats",
        "request_stats",
        "pause_generation",
        "continue_generation",
        "start_profile",
        "stop_profile",
        "snapshot",
        "update_weights",
        "timeline",
    ]
    ring.send(*(ControlRequest(ALICE, number, op, tenant=role) for number, op in enumerate(ops)))
    ring.loop.turn()
    to_detokenizer: list[Any] = ring.detokenizers[0].drain()
    passed_on = [each for each in to_detokenizer if isinstance(each, ControlRequest)]
    assert [each.op for each in passed_on] == (["timeline"] if allowed is None else [])
    allowed_here = set(ops) - {"timeline"} if allowed is None else allowed
    assert {message.op for message in ring.scheduler.drain()} == allowed_here
    replies = [each for each in to_detokenizer if not isinstance(each, ControlRequest)]
    assert all(isinstance(reply, ControlReply) and not reply.ok for reply in replies)
    errors = [msgspec.msgpack.decode(reply.body, type=ErrorInfo) for reply in replies]
    assert {error.status for error in errors} <= {403}
    assert len(errors) == (0 if allowed is None else len(ops) - len(allowed))
    assert [reply.number for reply in replies] == [
        number for number, op in enumerate(ops) if allowed is not None and op not in allowed
    ]


def test_a_key_for_metrics_generates_nothing(demo: Tokenizer) -> None:
    """Over HTTP its role keeps it from asking. Over TCP it was served."""
    ring = Ring(demo)
    ring.tenants = Tenants((Tenant("alice", "metrics"), Tenant("bob", "user")))
    again = with_attempt(make_handle(ALICE, 1), 1)
    ring.send(
        ask("alice", 0), GenerateRequest(again, SamplingParams(seed=1), "x", tenant="alice"), ask("bob", 2)
    )
    while ring.loop.turn():
        pass
    assert passed(ring) == [("bob", 2)]
    assert [(each.error.status, each.error.code) for each in ring.refusals()] == [
        (403, "permission_denied")
    ] * 2


@pytest.mark.parametrize("op", ["server_info", "pause_generation"])
def test_a_piece_of_an_adapter_comes_with_no_other_call(demo: Tokenizer, tmp_path: Path, op: Any) -> None:
    """The scheduler refused such a call, so the weights stayed on disk and counted for nobody."""
    ring = Ring(demo)
    ring.loop._adapters = AdapterTable(inline=InlineAdapters(tmp_path, 64, 1 << 20))
    ring.tenants = Tenants((Tenant("alice", "user"),))
    piece = AdapterPiece("lora", 1, "0" * 64, 1 << 10, b"{}")
    ring.send(ControlRequest(ALICE, 1, op, adapter=piece, tenant="alice"))
    ring.loop.turn()
    assert not list(tmp_path.iterdir())
    (reply,) = ring.detokenizers[0].drain()
    assert msgspec.msgpack.decode(reply.body, type=ErrorInfo).status == 403


def test_an_upload_that_the_tokenizer_fails_on_ends_nothing_else(
    demo: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake of this process")

    monkeypatch.setattr(InlineAdapters, "take", fail)
    ring = Ring(demo)
    ring.loop._adapters = AdapterTable(inline=InlineAdapters(tmp_path, 64, 1 << 20))
    ring.tenants = Tenants((Tenant("alice", "user"),))
    piece = AdapterPiece("lora", 1, "0" * 64, 1 << 10, b"{}")
    ring.send(ControlRequest(ALICE, 1, "put_adapter", adapter=piece, tenant="alice"), ask("bob", 0))
    while ring.loop.turn():
        pass
    assert passed(ring) == [("bob", 0)]
    (reply,) = ring.detokenizers[0].drain()
    assert msgspec.msgpack.decode(reply.body, type=ErrorInfo).status == 500


def test_who_sends_bad_adapters_again_and_again_is_refused_before_they_are_read(
    demo: Tokenizer, tmp_path: Path
) -> None:
    """Each may take 0.1 s to read, for which all others wait."""
    ring = Ring(demo)
    ring.loop._adapters = AdapterTable(inline=InlineAdapters(tmp_path, 64, 1 << 20))
    ring.tenants = Tenants((Tenant("alice", "user"), Tenant("bob", "user")))

    def status(tenant: str, client: int) -> int:
        first = AdapterPiece("lora", 1, "0" * 64, 1, b"{}")
        for piece in (first, msgspec.structs.replace(first, config=b"", data=b"x")):
            ring.send(ControlRequest(client, 1, "put_adapter", adapter=piece, tenant=tenant))
        while ring.loop.turn():
            pass
        *_, reply = (each for outbox in ring.detokenizers for each in outbox.drain())
        assert isinstance(reply, ControlReply)
        return msgspec.msgpack.decode(reply.body, type=ErrorInfo).status

    most = MAX_CREDIT // PRICE_OF_BAD_UPLOAD
    assert [status("alice", ALICE) for _ in range(most + 1)] == [400] * most + [429]
    assert status("bob", BOB) == 400
    ring.send(*(ask("alice", number) for number in range(PRICE_OF_BAD_UPLOAD // CREDIT_OF_SEQUENCE)))
    assert status("alice", ALICE) == 400


def test_a_full_disk_costs_the_caller_nothing_and_is_told_as_the_servers(
    demo: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tmp_path)

    ring = Ring(demo)
    ring.loop._adapters = AdapterTable(inline=InlineAdapters(tmp_path, 64, 1 << 20))
    ring.tenants = Tenants((Tenant("alice", "user"),))
    monkeypatch.setattr(Path, "write_bytes", full)
    for _ in range(MAX_CREDIT // PRICE_OF_BAD_UPLOAD + 1):
        piece = AdapterPiece("lora", 1, "0" * 64, 1, b"{}")
        ring.send(ControlRequest(ALICE, 1, "put_adapter", adapter=piece, tenant="alice"))
        while ring.loop.turn():
            pass
        (reply,) = (each for outbox in ring.detokenizers for each in outbox.drain())
        assert isinstance(reply, ControlReply)
        error = msgspec.msgpack.decode(reply.body, type=ErrorInfo)
        assert (error.status, error.param) == (500, "lora_config")
        assert "No space left on device" in error.message
        assert str(tmp_path) not in error.message


def test_a_text_for_which_no_thread_can_be_started_counts_no_longer(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted for ever as one that is encoded, so that the next messages of its tenant waited for it."""

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ring = Ring(demo)
    monkeypatch.setattr(arrivals, "MAX_ENCODING_CHARS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        ring.send(ask("alice", 1, text=FULL_TEXT + "x"))
        ring.loop.turn()
    assert [each.error.status for each in ring.refusals()] == [500]
    assert ring.loop.num_encoding == 0
    ring.send(ask("alice", 2))
    ring.loop.turn()
    assert passed(ring) == [("alice", 2)]


def test_a_refusal_is_still_a_terminal_for_each_sequence(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MAX_TENANT_CHARS", 10)
    ring = Ring(demo)
    several = SamplingParams(seed=1, n=3)
    ring.send(ask("alice", 0, text="first"), ask("alice", 1, text="second", sampling=several))
    ring.loop.turn()
    failed: list[RequestFailed] = ring.refusals()
    assert [each.handle for each in failed] == [make_handle(ALICE, 1, index) for index in range(3)]
    assert {each.error.status for each in failed} == {429}


def test_a_turn_takes_few_pieces_of_adapters_and_those_who_ask_for_little_pass_them(
    demo: Tokenizer,
) -> None:
    ring = Ring(demo)
    piece = AdapterPiece("lora", 1, "0" * 64, 1, b"{}")
    for number in range(200):
        ring.send(ControlRequest(ALICE, number, "put_adapter", adapter=piece, tenant="alice"))
    ring.loop.turn()
    assert len(ring.detokenizers[0].drain()) <= MAX_PIECE_CHARS // CHARS_PER_PIECE
    ring.send(ask("bob", 1))
    ring.loop.turn()
    assert passed(ring) == [("bob", 1)]


def test_parts_of_adapters_that_wait_are_bounded_for_each_tenant(demo: Tokenizer) -> None:
    """Up to 8,192 of 2 MiB each waited for one tenant."""
    ring = Ring(demo)
    part = AdapterPiece("lora", 1, "0" * 64, 1 << 20, b"{}")

    def waiting() -> int:
        return sum(
            isinstance(item.message, ControlRequest) and item.message.adapter is not None
            for _, items in ring.loop._arrivals._turns.items()
            for item in items
        )

    for number in range(200):
        ring.send(ControlRequest(ALICE, number, "put_adapter", adapter=part, tenant="alice"))
    ring.send(ControlRequest(BOB, 1, "put_adapter", adapter=part, tenant="bob"))
    ring.loop.turn()
    assert waiting() <= MAX_TENANT_PARTS + 1
    replies = []
    while ring.loop.turn() or ring.loop.is_busy:
        replies += ring.detokenizers[0].drain()
    replies += ring.detokenizers[0].drain()
    assert sorted(each.number for each in replies if each.client == ALICE) == list(range(200))
    refused = [each for each in replies if b"parts of adapters" in bytes(each.body)]
    assert len(refused) == 200 - MAX_TENANT_PARTS
    assert {each.client for each in refused} == {ALICE}
    for number in range(200):
        ring.send(ControlRequest(ALICE, number, "put_adapter", adapter=part))
    ring.loop.turn()
    assert ring.loop.is_blocked, "the owner's stay in the socket"
