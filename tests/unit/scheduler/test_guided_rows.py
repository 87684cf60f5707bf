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
from runtime.wire.format import Message, pack_ids, unpack_ids
from runtime.wire.guide import Guide
from runtime.wire.messages import (
    AbortRequest,
    AdvanceMatchers,
    CloseMatcher,
    DraftCounts,
    ErrorInfo,
    ForgetMatchers,
    FromGrammar,
    GrammarStarted,
    GuideRefused,
    MatcherState,
    MatcherStates,
    OpenMatcher,
    TokenizedRequest,
)
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import RequestFeature
from scheduler_proc.features.grammar_client import MAX_WAIT_S, GrammarClient
from scheduler_proc.features.speculation.speculation import SpeculationSettings
from tests.harness.scheduler.scheduler_parts import SETTING, message, run_until_idle
from tests.harness.simulation.fake_sampling import VOCAB_SIZE
from tests.harness.simulation.sim_system import System

PROMPTS = [[i + 1] * (5 + 3 * i) for i in range(4)]
MAX_DELAY_S = 0.4
CLOSES_AT = 11
"""Output tokens with which the guide `short` is complete, and nothing may follow."""


def allowed_after(ids: list[int]) -> list[int]:
    """A third of the vocabulary, by the output so far."""
    rest = sum((at + 1) * token for at, token in enumerate(ids)) % 3
    return [token for token in range(1, VOCAB_SIZE) if token % 3 == rest]


class FakeGrammar:
    """The grammar process: holds its matchers alone, forgets them when it dies, answers when it likes."""

    def __init__(self, late: float, seed: int = 0) -> None:
        self.late = late
        """How many of its answers take up to MAX_DELAY_S."""
        self.pass_time: Callable[[float], None] = lambda _: None
        self.now_s: Callable[[], float] = lambda: 0.0
        self.num_waits = 0
        self._rng = random.Random(seed)
        self._kinds: dict[bytes, str] = {}
        self._ids: dict[bytes, list[int]] = {}
        self._answers: list[tuple[float, FromGrammar]] = []
        self.is_dead = False

    @property
    def num_open(self) -> int:
        return len(self._ids)

    def send(self, message: Message) -> bool:
        if self.is_dead:
            return True  # into a socket that nobody reads
        if isinstance(message, OpenMatcher):
            self._kinds[message.handle] = message.guide.text
            self._ids[message.handle] = unpack_ids(message.output_ids).tolist()
            self._answer(message.handle)
        elif isinstance(message, AdvanceMatchers):
            for handle, num_tokens, packed in message.entries:
                ids = self._ids.get(handle)
                new = unpack_ids(packed).tolist()
                if ids is not None and len(ids) + len(new) == num_tokens:
                    ids += new
                    self._answer(handle)
        elif isinstance(message, CloseMatcher):
            self._ids.pop(message.handle, None)
        else:
            assert isinstance(message, ForgetMatchers)
        return True

    def _answer(self, handle: bytes) -> None:
        ids = self._ids[handle]
        is_closed = self._kinds[handle] == "short" and len(ids) >= CLOSES_AT
        bits = np.zeros(VOCAB_SIZE, np.uint8)
        bits[allowed_after(ids)] = 1
        mask = b"" if is_closed else np.packbits(bits, bitorder="little").tobytes()
        delay_s = self._rng.uniform(0.0, MAX_DELAY_S) if self._rng.random() < self.late else 0.0
        state = MatcherState(handle, len(ids), mask, is_closed)
        self._answers.append((self.now_s() + delay_s, MatcherStates((state,))))

    def news(self, wait_s: float) -> list[FromGrammar]:
        if wait_s > 0.0:
            self.num_waits += 1
            if not self._is_due():
                self.pass_time(wait_s)
        due = self._is_due()
        self._answers = [each for each in self._answers if each not in due]
        return [answer for _, answer in due]

    def _is_due(self) -> list[tuple[float, FromGrammar]]:
        return [each for each in self._answers if each[0] <= self.now_s() and not self.is_dead]

    def die(self) -> None:
        self.is_dead = True
        self._ids.clear()
        self._answers.clear()

    def start(self) -> None:
        self.is_dead = False
        self._answers.append((self.now_s(), GrammarStarted()))


@contextmanager
def serving(late: float = 0.0, **changes: Any) -> Iterator[tuple[System, FakeGrammar]]:
    grammar = FakeGrammar(late)
    systems: list[System] = []
    client = GrammarClient(grammar.send, grammar.news, lambda: systems[0].port.now_s())
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


def outputs(system: System, requests: list[TokenizedRequest]) -> list[list[int]]:
    run_until_idle(system, *requests)
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
        if late:
            assert system.lifecycle.num_retracted > 0


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
        began, num_waits = system.now, grammar.num_waits
        while plain.handle not in system.detokenizer.closed:
            system.step()
        assert grammar.num_waits == num_waits + 1
        assert system.now - began < MAX_WAIT_S + 40 * 0.02 + 0.5
        assert system.detokenizer.tokens[plain.handle] == alone
        assert system.lifecycle.num_retracted == 1
        grammar.start()
        run_until_idle(system)
        assert len(system.detokenizer.tokens[request(1, "long").handle]) == 30


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_grammar_process_that_dies_changes_no_token(expected: list[list[int]], depth: int) -> None:
    asked = requests()
    with serving(depth=depth) as (system, grammar):
        for each in asked:
            system.inbox.send(each)
        for turn in range(200):
            if turn % 7 == 3:
                grammar.die()
            elif turn % 7 == 5:
                grammar.start()
            system.step()
        grammar.start()
        run_until_idle(system)
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
        system.scheduler.intake._factories += (refuse,)
        run_until_idle(system, request(0))
        assert system.detokenizer.closed[request(0).handle].reason == "error"
        assert grammar.num_open == 0


def test_guesses_for_a_row_with_a_mask_are_dropped(expected: list[list[int]]) -> None:
    class Guesses(RequestFeature):
        def plan_row(self, row: ScheduledRow[Any]) -> None:
            row.guesses = [1, 2]

    with serving(depth=2) as (system, _):
        system.scheduler.intake._factories += (lambda req: Guesses() if req.guide else None,)
        assert outputs(system, requests()) == expected


def test_nobody_waits_for_the_guesses_of_a_row_with_a_mask(expected: list[list[int]]) -> None:
    """Which are never made: steps overlap as without speculation."""
    asked = request(1, "long", max_tokens=24, draft_ids=pack_ids(expected[1][:8]))
    with serving(depth=2, speculation=SpeculationSettings(True, 4)) as (system, _):
        system.inbox.send(asked)
        for _ in range(60):
            system.step()
            assert not system.rows.must_commit_first
        assert system.detokenizer.tokens[asked.handle] == expected[1]
        assert system.detokenizer.closed[asked.handle].drafts == DraftCounts()
