"""Guided rows in the real scheduler, over a grammar process that is late, dies, and refuses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.base.errors import RequestError
from runtime.ring.process import HEARTBEAT_S
from runtime.wire.format import TOKEN_BYTES, pack_ids
from runtime.wire.guide import Guide
from runtime.wire.handle import make_handle
from runtime.wire.messages import (
    AbortRequest,
    ErrorInfo,
    FromGrammar,
    GuideRefused,
    OpenMatcher,
    TokenizedRequest,
)
from runtime.wire.plan import BatchPlan, SampleMasks
from scheduler_proc.core.request import Request
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import RequestFeature
from scheduler_proc.features.guided import CAUTION
from scheduler_proc.features.mask_patience import LEAST_S, MAX_CREDIT_S, MAX_WAIT_S, SHARE, USUAL_S
from scheduler_proc.features.speculation.speculation import SpeculationSettings
from scheduler_proc.loop import SchedulerLoop
from scheduler_proc.observe.snapshot import SnapshotMaker
from tests.harness.scheduler.scheduler_parts import SETTING, message, run_until_idle
from tests.harness.simulation import sim_grammar
from tests.harness.simulation.fakes import FakeHandle
from tests.harness.simulation.sim_grammar import CLOSES_AT, NUM_SLOTS, FakeGrammar, allowed_after
from tests.harness.simulation.sim_system import System

PROMPTS = [[i + 1] * (5 + 3 * i) for i in range(4)]


@contextmanager
def serving(
    late: float = 0.0, num_slots: int = NUM_SLOTS, **changes: Any
) -> Iterator[tuple[System, FakeGrammar]]:
    grammar = FakeGrammar(late)
    systems: list[System] = []
    client = grammar.client(lambda: systems[0].port.now_s(), num_slots)
    # Rows end or are taken back, and time passes, after the commit of a turn: its record is not of its end.
    setting = dataclasses.replace(SETTING, **{"max_iterations": 1, **changes})
    system = System(setting, random.Random(0), grammar=client)
    systems.append(system)
    grammar.pass_time, grammar.now_s = system.pass_time, system.port.now_s
    try:
        yield system, grammar
    finally:
        system.executor.close()


def request(number: int, kind: str = "short", **options: Any) -> TokenizedRequest:
    made = message(number, PROMPTS[number], **{"max_tokens": 30, **options})
    return made if not kind else msgspec.structs.replace(made, guide=Guide("regex", kind))


def guided(number: int) -> TokenizedRequest:
    return msgspec.structs.replace(message(number, PROMPTS[0]), guide=Guide("regex", "short"))


def test_who_is_unknown_to_a_scheduler_without_guides_is_closed() -> None:
    with serving() as (system, grammar):
        loop = SchedulerLoop(system.scheduler)
        grammar.send(OpenMatcher(make_handle(9, 9), Guide("regex", "long")))
        assert grammar.num_open == 1
        system.pass_time(HEARTBEAT_S)
        loop.turn()
        assert grammar.num_open == 0


def outputs(system: System, requests: list[TokenizedRequest]) -> list[list[int]]:
    run_until_idle(system, *requests, max_steps=2000)
    system.kv.check()
    return [system.detokenizer.tokens[each.handle] for each in requests]


REQUESTS = [("short", 30), ("long", 24), ("", 30), ("short", 6)]


def requests() -> list[TokenizedRequest]:
    return [request(at, kind, max_tokens=length) for at, (kind, length) in enumerate(REQUESTS)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with serving(depth=1) as (system, _):
        return outputs(system, requests())


def test_every_token_is_one_that_the_guide_allows(expected: list[list[int]]) -> None:
    assert [len(ids) for ids in expected] == [CLOSES_AT, 24, 30, 6]
    for (kind, _), ids in zip(REQUESTS, expected, strict=True):
        kept = [token in allowed_after(ids[:at]) for at, token in enumerate(ids)]
        assert all(kept) == bool(kind)


def test_the_end_is_told(expected: list[list[int]]) -> None:
    asked = requests()
    with serving(depth=2) as (system, grammar):
        outputs(system, asked)
        reasons = [system.detokenizer.closed[each.handle].reason for each in asked]
        assert grammar.num_open == 0
    assert reasons == ["stop", "length", "length", "length"]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("late", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("changes", [{}, {"budget": 4}, {"num_pages": 24, "conservativeness": 0.01}])
def test_the_tokens_are_the_same_however_late_the_masks(
    expected: list[list[int]], depth: int, late: float, changes: dict[str, Any]
) -> None:
    with serving(late, depth=depth, **changes) as (system, _):
        assert outputs(system, requests()) == expected
        assert (system.stats.num_late_masks > 0) == (late > 0.0)
        assert system.lifecycle.num_retracted == 0 or "num_pages" in changes


def test_a_row_that_is_new_has_its_first_mask_without_a_wait_for_earlier_steps() -> None:
    with serving(depth=2) as (system, _):
        found: list[tuple[bool, int]] = []
        sample = system.executor.sample

        def watched(handle: Any, masks: SampleMasks) -> None:
            found.append((bool(masks.masks), len(system.scheduler.in_flight)))
            sample(handle, masks)

        system.executor.sample = watched  # type: ignore[method-assign]
        system.inbox.send(request(2, "", max_tokens=30))
        for _ in range(5):
            system.step()
        run_until_idle(system, request(0, "long", max_tokens=4))
    assert found[0] == (True, 1)  # what was launched before is in flight still
    assert found[1:] == [(True, 0)] * 3


def test_masks_for_which_there_is_no_slot_come_in_messages(expected: list[list[int]]) -> None:
    """One of three has a slot."""
    with serving(0.3, num_slots=1, depth=2) as (system, grammar):
        assert outputs(system, requests()) == expected
        assert grammar.slots.num_free == 1


def test_a_late_mask_holds_up_a_step_once_and_others_go_on_without_its_row() -> None:
    plain = request(2, "")
    with serving(depth=2) as (system, grammar):
        run_until_idle(system, plain)
        alone = system.detokenizer.tokens[plain.handle]
    with serving(depth=2) as (system, grammar):
        for each in (request(1, "long"), plain):
            system.inbox.send(each)
        for _ in range(6):
            system.step()
        grammar.is_dead = True  # from now on nothing comes
        num_waits = grammar.num_waits
        while plain.handle not in system.detokenizer.closed:
            system.step()
        assert grammar.num_waits == num_waits + 1
        assert system.detokenizer.tokens[plain.handle] == alone
        assert system.lifecycle.num_retracted == 0  # it keeps its row and its pages
        totals = system.stats.totals()
        assert totals["num_late_masks"] == 1
        most_s = LEAST_S + USUAL_S + MAX_CREDIT_S
        assert totals["mask_wait_s"] == pytest.approx(most_s)
        grammar.start()
        run_until_idle(system)
        assert len(system.detokenizer.tokens[request(1, "long").handle]) == 30


def delay(monkeypatch: pytest.MonkeyPatch, delays: dict[bytes, float]) -> None:
    """Have the masks of these sequences take so many seconds, and no others."""
    monkeypatch.setattr(FakeGrammar, "delay_s", lambda _, handle: delays.get(handle, 0.0))


@pytest.mark.parametrize("others", ["", "plain", "plain of the same tenant", "guided"])
def test_masks_that_always_take_long_hold_up_others_once(
    monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """Each step of all rows took as long as these masks, as it does where nobody else waits."""
    slow = [request(number, "long", max_tokens=25) for number in (0, 1)]
    delay(monkeypatch, {each.handle: 0.035 for each in slow})
    other = request(2, "long" if others == "guided" else "", max_tokens=60)
    other = msgspec.structs.replace(other, tenant="another" if others in ("plain", "guided") else "")
    asked = [*slow, other] if others else slow
    with serving(depth=2) as (system, _):
        began = system.now
        run_until_idle(system, *asked)
        took_s, waited_s = system.now - began, system.stats.mask_wait_s
        if others:
            assert system.stats.num_late_masks == len(slow)
            assert waited_s <= MAX_CREDIT_S + SHARE * took_s + 2 * (LEAST_S + 3 * USUAL_S)
        else:
            assert system.stats.num_late_masks == 0
            assert waited_s == pytest.approx(24 * MAX_WAIT_S)  # as the fake one's waits pass
        assert [len(system.detokenizer.tokens[each.handle]) for each in slow] == [25, 25]
        assert system.lifecycle.num_retracted == 0
        given = sum(len(each.input_ids) // TOKEN_BYTES for each in asked)
        made = sum(len(system.detokenizer.tokens[each.handle]) - 1 for each in asked)
        # Of a row whose mask is late nothing is computed again but the token before it.
        assert system.executor.num_computed == given + made + system.stats.num_late_masks


@pytest.mark.parametrize(("forward_s", "num_late"), [(0.06, 0), (0.0, 1)])
def test_no_mask_is_late_that_comes_while_the_model_computes(
    monkeypatch: pytest.MonkeyPatch, forward_s: float, num_late: int
) -> None:
    """Nobody waits for it: counted from the launch, each of these would be late."""
    guided, plain = request(0, "long", max_tokens=25), request(2, "", max_tokens=60)
    delay(monkeypatch, {guided.handle: 0.059})
    with serving(depth=2) as (system, _):
        launch, ends = system.executor.launch, dict[FakeHandle, float]()

        def launched(plan: BatchPlan) -> FakeHandle:
            handle = launch(plan)
            ends[handle] = system.now + forward_s
            return handle

        monkeypatch.setattr(system.executor, "launch", launched)
        monkeypatch.setattr(FakeHandle, "waits_for_masks", lambda handle: system.now >= ends[handle])
        run_until_idle(system, guided, plain)
        assert system.stats.num_late_masks == num_late
        assert len(system.detokenizer.tokens[guided.handle]) == 25


def test_after_a_late_mask_a_row_takes_every_other_step_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    guided, plain = request(0, "long", max_tokens=88), request(2, "", max_tokens=70)
    delays = {guided.handle: 0.0}
    delay(monkeypatch, delays)
    with serving(depth=2, max_len=200) as (system, _):
        system.inbox.send(guided)
        system.inbox.send(plain)

        def run_until(num_tokens: int) -> int:
            """Return the number of turns after which it has so many tokens."""
            num_turns = 0
            while len(system.detokenizer.tokens.get(guided.handle, ())) < num_tokens:
                system.step()
                num_turns += 1
            return num_turns

        run_until(4)
        assert run_until(14) == 10
        delays[guided.handle] = 1.0
        system.step()
        delays[guided.handle] = 0.0
        at = len(system.detokenizer.tokens[guided.handle])
        assert run_until(at + 1) > 50
        assert system.stats.num_late_masks == 1
        assert run_until(at + 1 + CAUTION // 2) == CAUTION
        run_until(at + CAUTION + 1)
        assert run_until(at + CAUTION + 6) == 5


def run_with_deaths(system: System, grammar: FakeGrammar, *, num_turns: int, every: int) -> None:
    """Let the grammar process die again and again for some turns, then run to the end."""
    for turn in range(num_turns):
        if turn % every == every // 2:
            grammar.die()
        elif turn % every == every - 2:
            grammar.start()
        system.step()
    grammar.start()
    run_until_idle(system)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_grammar_process_that_dies_changes_no_token(expected: list[list[int]], depth: int) -> None:
    asked = requests()
    with serving(depth=depth) as (system, grammar):
        for each in asked:
            system.inbox.send(each)
        run_with_deaths(system, grammar, num_turns=200, every=7)
        assert [system.detokenizer.tokens[each.handle] for each in asked] == expected


def test_what_waits_for_a_guide_holds_up_nobody_and_its_refusal_ends_it() -> None:
    waiting = [guided(10), guided(11)]
    with serving() as (system, grammar):
        grammar.is_dead = True
        for each in waiting:
            system.inbox.send(each)
        plain = request(2, "", max_tokens=5)
        system.inbox.send(plain)
        while plain.handle not in system.detokenizer.closed:
            system.step()
        assert not any(each.handle in system.detokenizer.closed for each in waiting)
        shown = SnapshotMaker(system.lifecycle, system.port.now_s, system.port.wall_s).make().waiting
        assert shown.reason == ["guide", "guide"]
        system.inbox.send(GuideRefused(waiting[0].handle, ErrorInfo("no", "invalid_guide", "regex", 400)))
        system.inbox.send(AbortRequest((waiting[1].handle,)))
        system.step()
        run_until_idle(system)
        closed = [system.detokenizer.closed[each.handle] for each in waiting]
        assert [each.reason for each in closed] == ["error", "abort"]
        assert closed[0].error is not None
        assert closed[0].error.code == "invalid_guide"
        assert grammar.num_open == 0


def test_many_that_wait_for_their_guides_do_not_hide_who_is_behind_them() -> None:
    setting = {"max_rows": 4}
    with serving(**setting) as (system, grammar):
        grammar.is_dead = True
        most = system.setting.limits().max_live - 1
        for at in range(most):
            system.inbox.send(guided(10 + at))
        plain = request(2, "", max_tokens=5)
        system.inbox.send(plain)
        for _ in range(40):
            system.step()
        assert plain.handle in system.detokenizer.closed
        assert system.detokenizer.closed[plain.handle].reason == "length"


def test_what_waits_looks_for_news_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (system, grammar):
        grammar.is_dead = True
        for at in range(8):
            system.inbox.send(guided(10 + at))
        system.step()
        looks: list[float] = []

        def note(wait_s: float) -> list[FromGrammar]:
            looks.append(wait_s)
            return grammar.news(wait_s)

        monkeypatch.setattr(grammar._client, "_news", note)
        for _ in range(5):
            system.step()
        assert len(looks) == 5
        grammar.start()
        run_until_idle(system)


def test_without_a_backend_a_guide_is_refused_by_name() -> None:
    asked = request(0)
    system = System(SETTING, random.Random(0))
    try:
        run_until_idle(system, asked)
        error = system.detokenizer.closed[asked.handle].error
    finally:
        system.executor.close()
    assert error is not None
    assert (error.status, error.param) == (400, "regex")
    assert "--grammar-backend none" in error.message


@pytest.mark.parametrize(("num_given", "reason"), [(4, "stop"), (CLOSES_AT, "stop")])
def test_a_resumed_sequence_goes_on_where_it_was(
    expected: list[list[int]], num_given: int, reason: str
) -> None:
    ids = expected[0]
    packed = np.array(ids[:num_given], np.int32).tobytes()
    again = msgspec.structs.replace(requests()[0], output_ids=packed)
    with serving(depth=2) as (system, _):
        run_until_idle(system, again)
        assert ids[:num_given] + system.detokenizer.tokens.get(again.handle, []) == ids
        assert system.detokenizer.closed[again.handle].reason == reason


def test_a_request_that_another_feature_refuses_leaves_no_matcher() -> None:
    def refuse(_: object) -> None:
        raise RequestError("never", code="no", status=400)

    with serving() as (system, grammar):
        system.scheduler.intake.maker.factories += (refuse,)
        run_until_idle(system, request(0))
        assert system.detokenizer.closed[request(0).handle].reason == "error"
        assert grammar.num_open == 0


class Proposer(RequestFeature):
    """Guesses whatever it is given, at whatever token."""

    def __init__(self, req: Request, guesses: Callable[[int], list[int]]) -> None:
        self._req = req
        self._guesses = guesses

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        req = self._req
        if not req.num_in_flight:
            row.guesses = self._guesses(req.num_output)[: max(0, req.max_len - req.num_tokens - 1)]


def guessing(
    system: System, expected: list[list[int]], num_guesses: int, wrong: Callable[[int], bool]
) -> None:
    """Have the rows of `requests()` guess what comes, and now and then what does not."""
    of = {each.handle: ids for each, ids in zip(requests(), expected, strict=True)}

    def attach(req: Request) -> RequestFeature:
        def guesses(done: int) -> list[int]:
            ids = [*of[req.handle], 1, 2, 3][done : done + num_guesses]
            return [(token + 1) % 96 if wrong(done + at) else token for at, token in enumerate(ids)]

        return Proposer(req, guesses)

    system.scheduler.intake.maker.factories += (attach,)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("late", [0.0, 0.5])
@pytest.mark.parametrize("wrong_every", [1, 3, 99])
def test_guesses_of_guided_rows_change_no_token(
    expected: list[list[int]], depth: int, late: float, wrong_every: int
) -> None:
    """Guesses that the guide forbids are among them, and some behind the end of a closed output."""
    with serving(late, depth=depth) as (system, grammar):
        guessing(system, expected, 5, lambda at: at % wrong_every == wrong_every - 1)
        assert outputs(system, requests()) == expected
        reasons = [system.detokenizer.closed[each.handle].reason for each in requests()]
        assert reasons == ["stop", "length", "length", "length"]
        assert (grammar.num_behind_guesses > 0) == (wrong_every > 1)


def test_right_guesses_of_a_guided_row_take_fewer_steps(expected: list[list[int]]) -> None:
    asked = request(1, "long", max_tokens=24, draft_ids=pack_ids([*expected[1][:11], 0, 0]))
    with serving(depth=2, speculation=SpeculationSettings(True, 4)) as (system, _):
        run_until_idle(system, asked)
        assert system.detokenizer.tokens[asked.handle] == expected[1]
        drafts = system.detokenizer.closed[asked.handle].drafts
        assert drafts is not None
        assert drafts.num_accepted >= 11


def test_guesses_whose_masks_are_late_cost_the_row_its_guesses_for_a_while(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back as for any late mask, and its tokens are the same; so where masks behind guesses are
    missing.
    """
    monkeypatch.setattr(sim_grammar, "SHORT", 1.0)
    asked = requests()[1]
    with serving(depth=2) as (system, grammar):
        guessing(system, expected, 5, lambda _: False)
        run_until_idle(system, asked)
        assert system.detokenizer.tokens[asked.handle] == expected[1]
        assert system.stats.num_late_masks == 1
        assert grammar.num_behind_guesses == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_process_that_dies_changes_no_guessed_token(expected: list[list[int]], depth: int) -> None:
    asked = requests()
    with serving(depth=depth) as (system, grammar):
        guessing(system, expected, 3, lambda at: at % 4 == 3)
        for each in asked:
            system.inbox.send(each)
        run_with_deaths(system, grammar, num_turns=120, every=5)
        assert [system.detokenizer.tokens[each.handle] for each in asked] == expected
        assert grammar.num_behind_guesses > 0


def test_guesses_for_a_row_whose_masks_are_of_one_place_are_dropped(expected: list[list[int]]) -> None:
    class OnePlace(RequestFeature):
        """Takes the guesses from a guide that could take them."""

        def plan_row(self, row: ScheduledRow[Any]) -> None:
            row.note_guesses = None

    with serving(depth=2) as (system, grammar):
        system.scheduler.intake.maker.factories += (lambda req: OnePlace() if req.guide else None,)
        guessing(system, expected, 2, lambda _: False)
        assert outputs(system, requests()) == expected
        assert grammar.num_behind_guesses == 0
