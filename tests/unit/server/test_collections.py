"""Garbage collection of the HTTP server: seldom, and what it finds is never much."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from carousel.server.garbage import (
    LEAST_BYTES,
    LEAST_OBJECTS,
    LEAST_S,
    USUAL_S,
    GarbageWatch,
    stop_automatic_collections,
)

NUM_OBJECTS, NUM_AT_ONCE = 100, 16


class Process:
    """A process that is watched, with a clock and a memory that the test sets."""

    def __init__(self) -> None:
        self.now_s, self.num_bytes, self.num_in_use = 1000.0, 0, 0
        self.found: list[int] = []
        """Objects that each collection has found."""
        self.watch = GarbageWatch(
            lambda: self.num_in_use, resident=lambda: self.num_bytes, clock=lambda: self.now_s
        )

    def note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.found.append(info["collected"])

    def looks_after(self, seconds: float = 0.0, num_bytes: int = 0) -> int:
        """Let time pass and memory grow, look once, and return how many collections that made."""
        self.now_s += seconds
        self.num_bytes += num_bytes
        before = len(self.found)
        self.watch.look()
        return len(self.found) - before


@pytest.fixture
def process() -> Iterator[Process]:
    stop_automatic_collections()
    process = Process()
    gc.callbacks.append(process.note)
    try:
        yield process
    finally:
        gc.callbacks.remove(process.note)
        gc.unfreeze()
        gc.enable()


def cycle(size: int = NUM_OBJECTS) -> list[Any]:
    """Objects that refer to each other."""
    made: list[Any] = [[] for _ in range(size)]
    for each in made:
        each.append(made)
    return made


def test_cycles_are_found_before_they_are_many(process: Process) -> None:
    open_requests: deque[list[Any]] = deque(maxlen=NUM_AT_ONCE)
    for _ in range(2000):
        open_requests.append(cycle())
        process.watch.look()
    assert len(process.found) > 20
    assert max(process.found) < 2 * LEAST_OBJECTS


def test_what_comes_and_goes_without_cycles_costs_no_collection(process: Process) -> None:
    """Automatic ones came every few hundred objects, and every second looked through all that lived."""
    living = [[number] for number in range(LEAST_OBJECTS // 2)]
    open_requests: deque[list[Any]] = deque(maxlen=NUM_AT_ONCE)
    for _ in range(2000):
        open_requests.append([[] for _ in range(NUM_OBJECTS)])
        process.watch.look()
    assert process.found == []
    assert len(living) + len(open_requests) > 0


def test_the_more_lives_the_rarer_it_is_looked_through(process: Process) -> None:
    living: list[list[int]] = []
    for number in range(40 * LEAST_OBJECTS):
        living.append([number])
        if not number % 100:
            process.watch.look()
    assert len(process.found) <= 12, "half as many again each time"


def test_few_objects_that_hold_much_are_found_by_their_bytes(process: Process) -> None:
    cycle(5)
    assert not process.looks_after(num_bytes=2 * LEAST_BYTES), "the last collection was just now"
    assert process.looks_after(LEAST_S)
    assert process.found[0] >= 6
    assert not process.looks_after(LEAST_S), "what is left is in use"
    process.num_bytes -= 2 * LEAST_BYTES
    assert not process.looks_after(LEAST_S)
    assert process.looks_after(LEAST_S, num_bytes=LEAST_BYTES), "from the fewest on"
    process.num_in_use += 2 * LEAST_BYTES
    assert not process.looks_after(LEAST_S, num_bytes=2 * LEAST_BYTES)


def test_whatever_is_left_is_found_in_time(process: Process) -> None:
    cycle(5)
    assert not process.looks_after(USUAL_S / 2)
    assert process.looks_after(USUAL_S)
    assert process.found[0] >= 6
