"""Classes of the user's get the scheduler's time and randomness if their constructor names them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from runtime.wire.transport import MemoryChannel
from scheduler_proc.port import Port
from tests.harness.models.stand_ins import RandomScheduler
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running


class Plain:
    """A policy as they were before there was anything to name."""

    def order(self, waiting: Any) -> range:
        return range(len(waiting))


class Timed(Plain):
    times: list[float]

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.clock = clock
        type(self).times = []

    def order(self, waiting: Any) -> range:
        self.times += [self.clock(), self.clock()]
        assert all(each.arrived_s <= self.clock() for each in waiting)
        return super().order(waiting)


class Lucky(Plain):
    def __init__(self, limit: int = 3, rng: random.Random | None = None) -> None:
        assert limit == 3
        self.rng = rng


class Anything(Plain):
    def __init__(self, *args: object, **kwargs: object) -> None:
        assert not args
        assert not kwargs


class OwnNames:
    """Its `clock` is one of the arguments that every scheduler of its kind is given."""

    def __init__(self, clock: int, pages: object, rng: random.Random) -> None:
        self.given = (clock, pages, rng)


class Schedules(RandomScheduler):
    seen: list[random.Random]

    def __init__(self, *args: Any, rng: random.Random) -> None:
        super().__init__(*args)
        type(self).seen = [rng]


class Ranks:
    seen: list[random.Random]

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        type(self).seen = [rng]

    def rank(self, run: object) -> float:
        return self.rng.random()


def a_port(seed: int | None = None) -> Port:
    return Port(MemoryChannel("scheduler_in"), [], seed=seed, clock=lambda: 5.0)


def test_a_class_gets_what_its_constructor_names_and_no_more() -> None:
    port = a_port()
    for cls in (Plain, Anything, dict):
        port.construct(cls)
    assert port.construct(Timed).clock() == 5.0
    assert port.construct(Lucky).rng is port.rng
    assert port.construct(OwnNames, 7, "pages").given == (7, "pages", port.rng)


def test_randomness_is_the_seeds() -> None:
    assert a_port(3).rng.random() == a_port(3).rng.random() != a_port(4).rng.random()
    first, again = a_port(), a_port()
    assert first.seed != again.seed
    assert Port(MemoryChannel("scheduler_in"), [], seed=first.seed).rng.random() == first.rng.random()


@pytest.mark.parametrize("name", ["Plain", "Timed", "Lucky", "Anything"])
def test_a_policy_of_each_kind_serves(name: str) -> None:
    with running(max_rows=1, policy=f"{__name__}:{name}") as system:
        run_until_idle(system, *(message(number, [1, 2, 3]) for number in range(3)))
        assert len(system.detokenizer.closed) == 3
        if name == "Timed":
            times = sys.modules[__name__].Timed.times
            assert times[::2] == times[1::2], "time moved within a turn"
            assert times == sorted(times)


def test_schedulers_and_eviction_policies_get_them_too() -> None:
    own = {"request_scheduler": f"{__name__}:Schedules", "eviction": f"{__name__}:Ranks"}
    with running(max_rows=1, **own) as system:
        run_until_idle(system, message(0, [1, 2, 3]))
        found = sys.modules[__name__]
        assert found.Schedules.seen[0] is found.Ranks.seen[0] is system.port.rng
