"""Moments of sampled sequences in the scheduler: in order, bounded, and none of any other."""

from __future__ import annotations

import pytest

from runtime.wire.messages import AbortRequest, TokenizedRequest
from runtime.wire.perf_metrics import MAX_STAMPS, Stamp, TraceStamps
from scheduler_proc.core.samples import Sampled
from scheduler_proc.features.stamps import Stamps
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import System

CONTEXT = bytes(range(1, 25)) + b"\x01"


def sampled(number: int, num_prompt: int = 9, max_tokens: int = 4, **fields: object) -> TokenizedRequest:
    trace = TraceStamps(CONTEXT, (Stamp("tokenizer_in", 0.0), Stamp("tokenizer_out", 0.0)))
    return message(number, [number + 1] * num_prompt, max_tokens, trace=trace, **fields)


def stamps_of(system: System, request: TokenizedRequest) -> list[Stamp]:
    closed = system.detokenizer.closed[request.handle]
    assert closed.trace is not None
    assert closed.trace.context == CONTEXT
    times = [stamp.at_s for stamp in closed.trace.stamps]
    assert times == sorted(times)
    return list(closed.trace.stamps)


def test_a_sampled_sequence_ends_with_its_moments() -> None:
    with running() as system:
        request, plain = sampled(1), message(2, [5] * 9)
        run_until_idle(system, request, plain)
        stamps = stamps_of(system, request)
        assert [stamp.name for stamp in stamps] == [
            *("tokenizer_in", "tokenizer_out", "scheduler", "row", "chunk"),
            *("first_token", "last_token", "closed"),
        ]
        values = {stamp.name: stamp.value for stamp in stamps}
        assert values["scheduler"] == 1
        assert values["chunk"] == 9
        assert (values["first_token"], values["last_token"], values["closed"]) == (1, 4, 4)
        assert system.detokenizer.closed[plain.handle].trace is None


def test_sampling_changes_no_token() -> None:
    with running(depth=2) as system:
        run_until_idle(system, sampled(1, max_tokens=20), sampled(2, max_tokens=20))
        with_stamps = {handle[8:]: tokens for handle, tokens in system.detokenizer.tokens.items()}
    with running(depth=2) as system:
        run_until_idle(system, *(message(number, [number + 1] * 9, 20) for number in (1, 2)))
        assert {handle[8:]: tokens for handle, tokens in system.detokenizer.tokens.items()} == with_stamps


def test_chunks_and_cached_tokens_are_told() -> None:
    with running(budget=16) as system:
        first, second = sampled(1, 40), sampled(1, 40, client=2)
        run_until_idle(system, first)
        run_until_idle(system, second)
        chunks = [stamp.value for stamp in stamps_of(system, first) if stamp.name == "chunk"]
        assert chunks == [16, 32, 40]
        (row,) = [stamp for stamp in stamps_of(system, second) if stamp.name == "row"]
        assert row.value == 36


def test_a_retraction_and_the_row_after_it_are_told() -> None:
    with running() as system:
        request = sampled(1, max_tokens=12)
        system.inbox.send(request)
        for _ in range(4):
            system.step()
        (req,) = system.scheduler.lifecycle.requests.values()
        system.scheduler.lifecycle.retract(req)
        run_until_idle(system)
        names = [stamp.name for stamp in stamps_of(system, request)]
        assert names.count("retraction") == 1
        assert names.count("row") == 2
        assert names.index("retraction") < names.index("row", names.index("row") + 1)
        assert names.count("first_token") == names.count("last_token") == 1


def test_who_never_had_a_row_has_no_token() -> None:
    with running(max_rows=1) as system:
        system.inbox.send(message(1, [3] * 9, 30))
        request = sampled(2)
        system.inbox.send(request)
        system.step()
        system.step()
        run_until_idle(system, AbortRequest((request.handle,)))
        names = [stamp.name for stamp in stamps_of(system, request)]
        assert names == ["tokenizer_in", "tokenizer_out", "scheduler", "closed"]


@pytest.mark.parametrize("num_before", [0, 50, MAX_STAMPS])
def test_stamps_are_bounded_and_the_end_is_kept_where_there_is_room(num_before: int) -> None:
    with running(budget=1, max_len=200, num_pages=128) as system:
        before = tuple(Stamp("attempt", 0.0, 1) for _ in range(num_before))
        request = message(1, [7] * 120, 2, trace=TraceStamps(CONTEXT, before))
        run_until_idle(system, request)
        stamps = stamps_of(system, request)
        assert len(stamps) <= MAX_STAMPS
        if num_before < MAX_STAMPS:
            assert stamps[-1].name == "closed"


@pytest.mark.parametrize("depth", [1, 2])
def test_after_the_first_token_a_sampled_row_is_decoded_like_any_other(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    num_seen, accept = 0, Stamps.accept

    def counted(self: Stamps, sampled: Sampled) -> list[int]:
        nonlocal num_seen
        num_seen += 1
        return accept(self, sampled)

    monkeypatch.setattr(Stamps, "accept", counted)
    with running(depth=depth) as system:
        request = sampled(1, max_tokens=30)
        run_until_idle(system, request)
        assert num_seen == depth, "with one step of overlap the second has been planned before the first ends"
        last, closed = stamps_of(system, request)[-2:]
        assert (last.name, last.value, last.at_s) == ("last_token", 30, closed.at_s)
        assert not system.kv.rows.timed


def test_the_last_token_of_one_that_is_aborted_keeps_its_own_time() -> None:
    with running() as system:
        request = sampled(1, max_tokens=50)
        system.inbox.send(request)
        for _ in range(6):
            system.step()
        committed_s = system.now
        system.pass_time(3.0)
        run_until_idle(system, AbortRequest((request.handle,)))
        last, closed = stamps_of(system, request)[-2:]
        assert (last.name, closed.name) == ("last_token", "closed")
        assert last.value == closed.value == len(system.detokenizer.tokens[request.handle])
        assert last.at_s == pytest.approx(committed_s)
        assert closed.at_s > committed_s + 2.0


def test_one_that_ends_while_it_waits_again_has_its_last_token_of_before() -> None:
    with running(max_rows=1) as system:
        request = sampled(1, max_tokens=50)
        system.inbox.send(request)
        for _ in range(6):
            system.step()
        committed_s = system.now
        (req,) = system.scheduler.lifecycle.requests.values()
        system.scheduler.lifecycle.retract(req)
        num_output = req.num_output
        system.pass_time(3.0)
        run_until_idle(system, AbortRequest((request.handle,)))
        last = stamps_of(system, request)[-2]
        assert (last.name, last.value) == ("last_token", num_output)
        assert last.at_s == pytest.approx(committed_s)
