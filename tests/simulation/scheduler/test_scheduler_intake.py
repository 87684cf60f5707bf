"""Intake: everything that arrives is answered, and nothing that arrives can raise."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from runtime.ring.suspects.roster import Suspects, suspect_of
from runtime.wire.format import pack_ids
from runtime.wire.handle import make_handle, sequence_key
from runtime.wire.messages import AbortRequest, Closed, ControlRequest, StopMatched, TokenizedRequest
from scheduler_proc.features.base import Cost, RequestFeature
from scheduler_proc.intake.limits import QueueShare
from scheduler_proc.intake.tombstones import TOMBSTONE_S, Tombstones
from tests.harness.scheduler.scheduler_parts import SETTING, message, run_until_idle, running
from tests.harness.simulation.fake_sampling import VOCAB_SIZE
from tests.harness.simulation.sim_system import System
from tests.harness.simulation.sim_traffic import stream_open

PROMPT = [1, 2, 3, 4, 6]


def closed_of(system: System, request: TokenizedRequest) -> Closed:
    return system.detokenizer.closed[request.handle]


def refused(request: TokenizedRequest) -> Closed:
    with running() as system:
        run_until_idle(system, request)
        system.check_empty()
        assert system.detokenizer.tokens[request.handle] == []
        closed = closed_of(system, request)
        assert closed.reason == "error"
        return closed


@pytest.mark.parametrize(
    ("tokens", "param", "code"),
    [
        ([], "input_ids", "invalid_value"),
        ([1, VOCAB_SIZE], "input_ids", "invalid_value"),
        ([1, -1], "input_ids", "invalid_value"),
        ([1] * SETTING.max_len, "input_ids", "context_length_exceeded"),
        ([1] * 5000, "input_ids", "context_length_exceeded"),
    ],
)
def test_a_prompt_that_can_never_run_is_closed_with_the_reason(
    tokens: list[int], param: str, code: str
) -> None:
    error = refused(message(1, tokens)).error
    assert error is not None
    assert (error.param, error.code, error.status) == (param, code, 400)


def test_bytes_that_are_no_ids_are_refused() -> None:
    request = message(1, PROMPT)
    error = refused(msgspec.structs.replace(request, input_ids=b"12345")).error
    assert error is not None
    assert error.param == "input_ids"
    error = refused(msgspec.structs.replace(request, output_ids=pack_ids([VOCAB_SIZE]))).error
    assert error is not None
    assert error.param == "output_ids"


def test_a_request_without_a_seed_is_refused() -> None:
    request = message(1, PROMPT)
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    error = refused(msgspec.structs.replace(request, sampling=sampling)).error
    assert error is not None
    assert error.param == "seed"


def test_the_longest_prompt_that_fits_gives_one_token() -> None:
    with running() as system:
        request = message(1, [3] * (SETTING.max_len - 1), max_tokens=50)
        run_until_idle(system, request)
        assert closed_of(system, request).reason == "length"
        assert len(system.detokenizer.tokens[request.handle]) == 1


def test_without_a_limit_the_output_goes_to_the_end_of_the_context() -> None:
    with running() as system:
        request = message(1, PROMPT, max_tokens=None)
        run_until_idle(system, request)
        assert closed_of(system, request).reason == "length"
        assert len(system.detokenizer.tokens[request.handle]) == SETTING.max_len - len(PROMPT)


def test_a_feature_that_needs_more_rows_than_there_are_is_refused() -> None:
    class TooWide(RequestFeature):
        def cost(self) -> Cost:
            return Cost(rows=SETTING.max_rows + 1)

    with running() as system:
        system.scheduler.intake.maker.factories = (lambda req: TooWide(),)
        system.scheduler.intake.maker.may_ask = None
        request = message(1, PROMPT)
        run_until_idle(system, request)
        error = closed_of(system, request).error
        assert error is not None
        assert error.code == "request_too_large"


def test_one_sequence_more_than_may_live_is_refused_with_a_time_to_come_back() -> None:
    with running(max_live=3, max_rows=2) as system:
        requests = [message(i, [i + 1] * 5, max_tokens=9) for i in range(5)]
        for request in requests:
            system.inbox.send(request)
        system.step()
        assert len(system.lifecycle.requests) == 3
        replacing = message(0, [1] * 5, max_tokens=9, attempt=1)
        run_until_idle(system, replacing)
        reasons = [system.detokenizer.closed.get(request.handle) for request in requests]
        assert reasons[0] is None, "replaced, which needs no room of its own"
        for closed in reasons[3:]:
            assert closed is not None
            assert closed.error is not None
            assert (closed.error.code, closed.error.status) == ("overloaded", 503)
            assert closed.error.retry_after_s > 0.0
        for request in (replacing, *requests[1:3]):
            assert closed_of(system, request).reason == "length"
        later = message(9, PROMPT)
        run_until_idle(system, later)
        assert closed_of(system, later).reason == "length"
        system.check_empty()


def num_taken_in(system: System, client: int, requests: range, **fields: Any) -> int:
    """Return how many of these requests of a client, sent at once, are taken in."""
    num_before = system.lifecycle.accounts.of("").num_live_of[make_handle(client, 0)[:8]]
    for number in requests:
        request = message(number, [client, 5], max_tokens=1, client=client, **fields)
        system.scheduler.intake.receive(request)
    return system.lifecycle.accounts.of("").num_live_of[make_handle(client, 0)[:8]] - num_before


def test_a_client_that_floods_leaves_room_for_others() -> None:
    with running(max_live=100) as system:
        intake = system.scheduler.intake
        intake.maker.limits = dataclasses.replace(intake.maker.limits, client_share=QueueShare(76, 100, 100))
        assert num_taken_in(system, 1, range(100)) == 76
        assert num_taken_in(system, 2, range(1)) == 1
        assert num_taken_in(system, 1, range(100, 200)) == 0
        # However many flood, the next one finds a place.
        assert all(num_taken_in(system, client, range(1, 100)) for client in range(2, 5))
        system.lifecycle.check()
        run_until_idle(system)
        errors = {closed.error.code for closed in system.detokenizer.closed.values() if closed.error}
        assert errors == {"client_overloaded", "overloaded"}
        assert not system.lifecycle.accounts.of("").num_live_of


def test_who_makes_requests_again_gets_no_more_than_a_client_can_have_had() -> None:
    with running(max_live=100) as system:
        intake = system.scheduler.intake
        intake.maker.limits = dataclasses.replace(intake.maker.limits, client_share=QueueShare(30, 100, 40))
        assert num_taken_in(system, 1, range(60), is_again=True) == 40
        assert num_taken_in(system, 2, range(60), is_again=True) == 40
        run_until_idle(system)
        errors = [closed.error.code for closed in system.detokenizer.closed.values() if closed.error]
        assert errors == 40 * ["client_overloaded"]


def test_new_requests_that_come_first_take_no_place_of_what_is_made_again() -> None:
    """After a restart they may: they were on their way when the engine died."""
    with running(max_live=100) as system:
        intake = system.scheduler.intake
        intake.maker.limits = dataclasses.replace(intake.maker.limits, client_share=QueueShare(40, 100, 40))
        assert num_taken_in(system, 1, range(100, 140)) == 40
        assert num_taken_in(system, 1, range(60), is_again=True) == 40
        system.lifecycle.check()
        run_until_idle(system)
        assert not system.lifecycle.accounts.of("").num_again_of
        assert num_taken_in(system, 1, range(200, 260), is_again=True) == 40


def test_an_attempt_above_0_is_a_new_request_unless_it_is_made_again() -> None:
    """Any client may say that it asks for the second time; the tokenizer knows whether somebody has died."""
    with running(max_live=100) as system:
        intake = system.scheduler.intake
        intake.maker.limits = dataclasses.replace(intake.maker.limits, client_share=QueueShare(40, 100, 100))
        assert num_taken_in(system, 1, range(60), attempt=1) == 40
        assert num_taken_in(system, 1, range(60, 70), attempt=1, is_again=True) == 10
        waiting = [(req.seq, req.is_again) for req in system.lifecycle.waiting]
        assert waiting[:10] == [(number, True) for number in range(41, 51)]
        assert waiting[10:] == [(number, False) for number in range(1, 41)]
        system.lifecycle.check()
    with running(max_live=3) as system:
        assert num_taken_in(system, 1, range(9), attempt=1) == 3


def test_a_client_may_be_allowed_the_whole_queue() -> None:
    assert not any(QueueShare(18, 18, 18).is_used_up(number, number) for number in range(18))


def test_a_client_that_is_alone_has_the_whole_queue_until_another_one_connects() -> None:
    connected, num_looks = [1], 0

    def is_alone() -> bool:
        nonlocal num_looks
        num_looks += 1
        return len(connected) == 1

    with running(max_live=100) as system:
        intake = system.scheduler.intake
        share = QueueShare(76, 100, 100, is_lifted=is_alone)
        intake.maker.limits = dataclasses.replace(intake.maker.limits, client_share=share)
        assert num_taken_in(system, 1, range(76)) == 76
        assert not num_looks, "at the status page while the share is not used up"
        assert num_taken_in(system, 1, range(76, 90)) == 14
        connected.append(2)
        assert num_taken_in(system, 1, range(90, 100)) == 0
        assert num_taken_in(system, 2, range(1)) == 1


# -- resume and attempts -----------------------------------------------------------------------------------


def test_who_is_suspected_runs_alone_and_who_is_guilty_not_at_all() -> None:
    """The launcher says so, whichever attempt it is; clients say nothing of it."""
    keys = [sequence_key(message(number, [1]).handle) for number in range(3)]
    suspects = list(map(suspect_of, keys))
    with running() as system:
        system.scheduler.intake.suspects = Suspects({suspects[0]: 0}, guilty=frozenset(suspects[1:2]))
        requests = [message(number, [1, 2, 3], attempt=3) for number in range(3)]
        for request in requests:
            system.inbox.send(request)
        system.step()
        assert list(system.lifecycle.requests) == [keys[0], keys[2]]
        assert system.lifecycle.solitary
        assert system.lifecycle.roster.suspects() == {suspects[0], suspects[2]}
        closed = closed_of(system, requests[1])
        assert closed.error is not None
        assert (closed.error.code, closed.error.status) == ("quarantined", 400)
        run_until_idle(system)
        assert system.lifecycle.roster.suspects() == set()


def full_output(request: TokenizedRequest) -> list[int]:
    with running() as system:
        run_until_idle(system, request)
        return system.detokenizer.tokens[request.handle]


def test_a_resumed_request_goes_on_after_what_it_has() -> None:
    whole = full_output(message(1, PROMPT, max_tokens=8))
    resumed = message(1, PROMPT, max_tokens=8, attempt=1, output_ids=pack_ids(whole[:5]))
    with running() as system:
        run_until_idle(system, resumed)
        assert system.detokenizer.tokens[resumed.handle] == whole[5:]
        assert closed_of(system, resumed).reason == "length"


def test_a_resumed_request_that_lacks_only_its_end_is_closed_at_once() -> None:
    whole = full_output(message(1, PROMPT, max_tokens=4))
    by_length = message(1, PROMPT, max_tokens=4, attempt=1, output_ids=pack_ids(whole))
    stops = {"stop_token_ids": (whole[1],)}
    by_stop = message(2, PROMPT, max_tokens=9, attempt=1, output_ids=pack_ids(whole[:2]), sampling=stops)
    with running() as system:
        run_until_idle(system, by_length, by_stop)
        assert closed_of(system, by_length).reason == "length"
        assert (closed_of(system, by_stop).reason, closed_of(system, by_stop).stop_token) == (
            "stop",
            whole[1],
        )
        assert system.executor.num_computed == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"output_ids": pack_ids([1] * 5)}, "5 tokens of output, there are at most 4"),
        ({"num_prompt_logprobs": len(PROMPT)}, f"{len(PROMPT)} logprobs of the prompt"),
    ],
)
def test_who_claims_more_than_an_attempt_can_have_delivered_is_refused(
    fields: dict[str, Any], reason: str
) -> None:
    lying = msgspec.structs.replace(message(1, PROMPT, max_tokens=4, attempt=1), **fields)
    error = refused(lying).error
    assert error is not None
    assert (error.param, error.status) == ("resume", 400)
    assert reason in error.message


def test_cached_tokens_of_a_replaced_attempt_are_those_of_the_first() -> None:
    """Its own prompt is in the cache when it comes again."""
    prompt = [*PROMPT, 7, 8, 9, 10]
    with running() as system:
        system.inbox.send(message(1, prompt))
        system.step()
        again = message(1, prompt, attempt=1)
        run_until_idle(system, again, message(2, prompt))
        assert closed_of(system, again).cached_tokens == 0
        assert closed_of(system, message(2, prompt)).cached_tokens > 0


def test_a_higher_attempt_replaces_the_live_one_without_a_terminal() -> None:
    with running() as system:
        old, new = message(1, PROMPT), message(1, PROMPT, attempt=2)
        system.inbox.send(old)
        system.step()
        run_until_idle(system, new, old, message(1, PROMPT, attempt=1))
        assert set(system.detokenizer.closed) == {new.handle}
        assert system.detokenizer.opened == {old.handle, new.handle}
        assert system.lifecycle.num_replaced == 1


# -- the end, from outside ---------------------------------------------------------------------------------


def test_an_abort_ends_exactly_the_handle_it_names() -> None:
    with running() as system:
        requests = [message(i, PROMPT, max_tokens=20) for i in (1, 256 + 1)]
        run_until_idle(system, *requests, AbortRequest((requests[0].handle,)))
        assert closed_of(system, requests[0]).reason == "abort"
        assert closed_of(system, requests[1]).reason == "length"


def test_an_abort_that_comes_first_kills_the_request_on_arrival() -> None:
    with running() as system:
        request = message(1, PROMPT)
        run_until_idle(system, AbortRequest((request.handle,)), request, message(2, PROMPT))
        assert closed_of(system, request).reason == "abort"
        assert system.detokenizer.tokens[request.handle] == []


def test_an_abort_by_client_ends_all_of_its_own_and_nobody_elses() -> None:
    with running() as system:
        mine = [message(i, PROMPT, max_tokens=30) for i in range(6)]
        other = message(1, PROMPT, max_tokens=30, client=2)
        for request in (*mine, other):
            system.inbox.send(request)
        system.step()
        later = message(9, PROMPT)
        run_until_idle(system, AbortRequest(client=1), later)
        assert {closed_of(system, request).reason for request in mine} == {"abort"}
        assert closed_of(system, other).reason == "length"
        assert closed_of(system, later).reason == "length", "the client lives and may ask again"
        system.check_empty()


def test_a_stop_string_closes_a_live_handle_and_nothing_else() -> None:
    with running() as system:
        request = message(1, PROMPT, max_tokens=30)
        system.inbox.send(request)
        system.step()
        run_until_idle(system, StopMatched(request.handle, 1), StopMatched(make_handle(1, 5), 3))
        assert closed_of(system, request).reason == "stop_string"
        run_until_idle(system, StopMatched(request.handle, 1))


def test_tombstones_end_with_time_and_are_bounded() -> None:
    now = [0.0]
    tombstones = Tombstones(lambda: now[0], max_handles=8)
    tombstones.add(b"a")
    assert tombstones.try_take(b"a")
    assert not tombstones.try_take(b"a")
    tombstones.add(b"b")
    now[0] = TOMBSTONE_S + 1
    assert not tombstones.try_take(b"b")
    for i in range(8 + 5):
        tombstones.add(i.to_bytes(4, "little"))
    assert len(tombstones) == 8
    assert not tombstones.try_take((0).to_bytes(4, "little")), "the oldest made room"
    now[0] *= 3
    tombstones.add(b"c")
    assert len(tombstones) == 1


# -- questions ---------------------------------------------------------------------------------------------


def test_control_requests_are_answered_by_their_number() -> None:
    with running() as system:
        run_until_idle(system, message(1, [*PROMPT, 7, 8, 9, 10]))
        run_until_idle(system, ControlRequest(7, 1, "server_info"), ControlRequest(7, 2, "flush_cache"))
        info, flushed = system.detokenizer.replies
        assert (info.client, info.number, info.ok) == (7, 1, True)
        body = msgspec.msgpack.decode(info.body)
        assert body["num_pages"] == SETTING.num_pages
        assert body["num_cached_pages"] == 3
        assert msgspec.msgpack.decode(flushed.body) == {"num_freed_pages": 3, "num_pages_in_use": 0}
        system.check_empty()


def test_sequences_of_a_request_that_wait_keep_one_prompt() -> None:
    """128 sequences of a long prompt took 128 times its size."""
    handles = [make_handle(1, 1, index) for index in range(8)]
    tokens, asked = PROMPT * 3, message(1, PROMPT * 3)
    sent = [
        msgspec.structs.replace(
            asked, handle=handle, input_ids=pack_ids(tokens), stream_open=stream_open(handle, len(tokens))
        )
        for handle in handles
    ]
    with running(max_rows=1) as system:
        for request in sent:
            assert system.inbox.send(request)
        system.step()
        waiting = [each.parked for each in system.lifecycle.requests.values() if each.row < 0]
        assert len(waiting) == 7
        assert len({id(parked) for parked in waiting}) == 1
        run_until_idle(system)
        system.check_empty()
