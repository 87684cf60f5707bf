"""Garbage collection of the HTTP server: no collection holds up its event loop for long."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

from carousel.server.main import collect_often

NUM_REQUESTS, NUM_OBJECTS, NUM_AT_ONCE = 2000, 100, 16


def most_in_full_collection() -> int:
    """Return the most objects that one found while requests came and left cycles."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            found.append(info["collected"])

    open_requests: deque[list[Any]] = deque(maxlen=NUM_AT_ONCE)
    gc.callbacks.append(note)
    try:
        for _ in range(NUM_REQUESTS):
            request: list[Any] = [[] for _ in range(NUM_OBJECTS)]
            for each in request:
                each.append(request)
            open_requests.append(request)
    finally:
        gc.callbacks.remove(note)
    return max(found)


def test_a_full_collection_finds_the_cycles_of_a_few_requests() -> None:
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.collect()  # else a full one waits for a quarter as many objects as the tests before have left
    try:
        gc.set_threshold(700, 10, 10)
        assert most_in_full_collection() > 15_000
        collect_often()
        assert most_in_full_collection() < 8_000
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
