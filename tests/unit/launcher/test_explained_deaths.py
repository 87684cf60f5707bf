"""Deaths of the engine that end a launch, and those that do not because the culprit is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import pytest

from runtime.base.errors import StartError
from runtime.launcher.deaths.engine_deaths import DeathCounts
from runtime.launcher.deaths.restart_budget import BACK_OFF_S, IN_VAIN_FACTOR, RestartBudget
from runtime.ring.suspects.roster import Seen, suspect_of, tenant_mark
from runtime.wire.handle import NO_HANDLE, make_handle

LIMIT = 5
WINDOW_S = 60.0
VICTIMS = [make_handle(1, number) for number in range(8)]
REACHED = 50


class FakeLaunch:
    """Launch whose engine is ready half a second after its start, and dies half a second later.

    Sequences are named by their handles. The rules are those of the scheduler: suspects go first, and those
    that are to run alone do so before anybody else runs.
    """

    def __init__(self) -> None:
        self.deaths = DeathCounts()
        self.budget = RestartBudget(WINDOW_S)
        self.suspects = self.deaths.count(Seen(), NO_HANDLE, -1e6)
        self.now_s = 0.0
        self.delays_s: list[float] = []

    def die(
        self,
        running: Mapping[bytes, str],
        *,
        left: Mapping[bytes, str] | None = None,
        past: Iterable[bytes] = (),
        alone: bytes = NO_HANDLE,
        has_served: bool = False,
    ) -> None:
        """Let the engine die by itself. Raises StartError if that ends the launch."""
        marks = {suspect_of(handle): tenant_mark(tenant) for handle, tenant in running.items()}
        gone = {suspect_of(handle): tenant_mark(tenant) for handle, tenant in (left or {}).items()}
        keys = frozenset(map(suspect_of, past))
        seen = Seen(
            marks, gone, dict.fromkeys(marks, REACHED), keys & self.suspects.watched.keys(), has_served
        )
        self.suspects = self.deaths.count(seen, alone, self.now_s)
        verdict = self.deaths.verdict
        delay_s = self.budget.spend("engine", LIMIT, self.now_s, from_outside=False, verdict=verdict)
        self.delays_s.append(delay_s)
        self.now_s += delay_s + 1.0

    def is_refused(self, handle: bytes, tenant: str) -> bool:
        is_suspended = self.suspects.suspended.get(tenant_mark(tenant), 0.0) > self.now_s
        return is_suspended or suspect_of(handle) in self.suspects.guilty


def of(handles: Iterable[bytes], tenant: str = "") -> dict[bytes, str]:
    return dict.fromkeys(handles, tenant)


def new_handles(client: int) -> Callable[[], bytes]:
    numbers = itertools.count(1)
    return lambda: make_handle(client, next(numbers))


def num_deaths_until_the_end(launch: FakeLaunch, die: Callable[[], None], upto: int = 200) -> int:
    for number in range(upto):
        try:
            die()
        except StartError:
            return number
    raise AssertionError("the launch goes on for ever")


def test_two_keys_whose_requests_stay_are_refused_and_the_launch_goes_on() -> None:
    """Each sequence that ends the engine comes again until it is quarantined, and a new one comes then."""
    launch, victims = FakeLaunch(), of(VICTIMS, "victim")
    new = {name: new_handles(client) for client, name in enumerate("ab", 2)}
    poison = {name: make() for name, make in new.items()}
    while True:
        for name, make in new.items():
            if suspect_of(poison[name]) in launch.suspects.guilty:
                poison[name] = make()
        there = {handle: name for name, handle in poison.items() if not launch.is_refused(handle, name)}
        if not there:
            break
        alone = [handle for handle in there if suspect_of(handle) in launch.suspects.alone]
        if alone:
            launch.die({alone[0]: there[alone[0]]}, alone=alone[0])
        elif launch.suspects.watched.keys() & set(map(suspect_of, there)):
            launch.die({**victims, **there})
        else:  # the victims were suspects, and have come past
            launch.die({**victims, **there}, past=VICTIMS)
    assert len(launch.delays_s) > LIMIT
    assert {tenant_mark(name) for name in new} == launch.suspects.suspended.keys()


@pytest.mark.parametrize("tenants", [("a", "b"), ("", "")])
def test_callers_who_hang_up_and_come_again_with_other_requests_do_not_end_the_launch(
    tenants: tuple[str, str],
) -> None:
    """Two at a time, with keys or without. Those who were there beside them come past each time."""
    launch, others = FakeLaunch(), of(VICTIMS, "victim" if tenants[0] else "")
    new = [new_handles(client) for client in (2, 3)]
    for _ in range(60):
        launch.die(
            {**others, **{make(): name for make, name in zip(new, tenants, strict=True)}}, past=VICTIMS
        )
    assert launch.delays_s[-1] == BACK_OFF_S[-1]


def test_a_caller_without_a_key_who_is_alone_with_the_engine_is_counted_out_in_the_end() -> None:
    """Nothing tells it from an engine that dies of every request."""
    launch, new = FakeLaunch(), new_handles(2)
    num_deaths = num_deaths_until_the_end(launch, lambda: launch.die({new(): ""}))
    assert num_deaths == IN_VAIN_FACTOR * LIMIT
    with pytest.raises(StartError, match="restarted 20 times without serving one request to its end"):
        launch.die({new(): ""})


def test_served_requests_between_its_deaths_show_that_the_engine_works() -> None:
    launch, new = FakeLaunch(), new_handles(2)
    for _ in range(100):
        launch.die({new(): ""}, has_served=True)


def test_an_engine_that_dies_of_whatever_is_there_ends_the_launch() -> None:
    """The same callers come again, none is ever past. They would have to run alone one by one."""
    launch = FakeLaunch()

    def die() -> None:
        alone = [handle for handle in VICTIMS if suspect_of(handle) in launch.suspects.alone]
        there = [handle for handle in VICTIMS if not launch.is_refused(handle, "")]
        if alone:
            launch.die(of(alone[:1]), alone=alone[0])
        else:
            launch.die(of(there or [make_handle(9, len(launch.delays_s))]))

    assert num_deaths_until_the_end(launch, die) <= IN_VAIN_FACTOR * LIMIT


@pytest.mark.parametrize("tenant", ["", "the only one"])
def test_a_machine_that_fails_again_and_again_whoever_is_there_ends_the_launch(tenant: str) -> None:
    """All have come past the death before when it fails once more, so nobody is to blame."""
    launch = FakeLaunch()

    def die() -> None:
        launch.die(of(VICTIMS, tenant), past=VICTIMS, has_served=True)

    assert num_deaths_until_the_end(launch, die) == LIMIT


def test_one_sequence_that_a_failing_machine_is_laid_to_first_comes_past_and_the_death_counts() -> None:
    launch = FakeLaunch()
    handle = VICTIMS[0]

    def die() -> None:
        launch.die(of([handle]), past=[handle], has_served=True)

    assert num_deaths_until_the_end(launch, die) <= LIMIT + 1


def test_who_hangs_up_in_the_fatal_step_that_it_had_alone_is_found_guilty() -> None:
    launch = FakeLaunch()
    poison = make_handle(2, 1)
    for _ in range(2):
        launch.die({**of(VICTIMS, "victim"), poison: "a"})
    launch.die({}, left={poison: "a"}, alone=poison)
    assert launch.suspects.guilty == {suspect_of(poison)}
    assert not launch.suspects.alone
    assert launch.deaths.verdict.explained == {0.0: True, 1.0: True, 1.0 + BACK_OFF_S[1] + 1.0: True}
