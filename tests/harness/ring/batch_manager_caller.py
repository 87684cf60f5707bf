"""BatchManager over a fake ring, with callbacks that record their calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from carousel import BatchManager, GenerationExecutor, InferenceRequest
from runtime.settings.config import RuntimeConfig
from runtime.wire.stats import InflightBatchingStats, IterationStats, IterationStatsPage, KvCacheStats
from tests.harness.ring.fake_ring import WAIT_S, Answer, FakeRing, say_nothing

LARGEST = (1 << 64) - 1


@dataclass(eq=False)
class Caller:
    """The four callbacks, and what was said in them, in order."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    to_send: list[Any] = field(default_factory=list)
    to_stop: set[int] = field(default_factory=set)
    responses: list[tuple[int, dict[str, Any], bool, str]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def get(self, max_num_requests: int) -> list[Any]:
        with self.changed:
            self._note("get", max_num_requests)
            requests, self.to_send = self.to_send, []
            return requests

    def send(self, request_id: int, tensors: list[Any], is_final: bool, error: str) -> None:
        with self.changed:
            self.responses.append((request_id, dict(tensors), is_final, error))
            self._note("send", request_id)

    def poll_stop(self) -> set[int]:
        with self.changed:
            self._note("poll_stop", None)
            return self.to_stop

    def report(self, stats: str) -> None:
        with self.changed:
            self.stats.append(json.loads(stats))
            self._note("report", None)

    def _note(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        self.changed.notify_all()

    def give(self, *requests: Any) -> None:
        with self.changed:
            self.to_send += requests

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), "not in time"

    def wait_responses(self, num: int) -> None:
        """Until there are so many, or more."""
        self.wait_for(lambda: len(self.responses) >= num)

    def wait_final(self, num_final: int = 1) -> None:
        self.wait_for(lambda: sum(is_final for _, _, is_final, _ in self.responses) == num_final)

    def wait_turn(self) -> None:
        """Until a whole turn has been made from now on: everything that was given has been looked at."""
        with self.changed:
            num_before = len(self.calls)
        self.wait_for(lambda: [name for name, _ in self.calls[num_before:]].count("get") >= 2)


def request(request_id: int, text: str = "a", **inputs: Any) -> InferenceRequest:
    ids = np.array([[ord(each) for each in text]], np.int32)
    length = np.array([inputs.pop("length", 3)], np.int32)
    return InferenceRequest(request_id, {"input_ids": ids, "request_output_len": length, **inputs})


Make: TypeAlias = Callable[..., tuple[BatchManager, FakeRing, Caller]]
"""Function (answer, config, settings) -> a manager, the ring behind it and its callbacks."""


@contextmanager
def managers(run_dir: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(
            answer: Answer = say_nothing, *, config: RuntimeConfig | None = None, **settings: Any
        ) -> tuple[BatchManager, FakeRing, Caller]:
            ring = FakeRing(run_dir, answer, config)
            stack.callback(ring.close)
            executor = GenerationExecutor.create(run_dir=run_dir)
            caller = Caller()
            callbacks = (caller.get, caller.send, caller.poll_stop, caller.report)
            manager = BatchManager(executor, *callbacks, **settings)
            stack.callback(manager.close)
            stack.callback(executor.shutdown)  # first: nobody will answer what a test has left
            return manager, ring, caller

        yield make


def statistics(*iterations: int) -> dict[str, Any]:
    """Answer of the fake ring to a question for them."""
    kv = KvCacheStats(10, 4, 6, 16, 6, 6, 0, 6, 0.0)
    step = InflightBatchingStats(3, 1, 2, 0, 7, 0, 0, 1.0)
    limits = (8, 8, 0, 8, 64, 0, 64, 0, 1, 0)
    records = tuple(
        IterationStats(
            "11-22-2026 04:00:00", number, 1.0, 0.0, 0, 3, 0, 0, *limits, kv, inflight_batching_stats=step
        )
        for number in iterations
    )
    page: dict[str, Any] = msgspec.to_builtins(IterationStatsPage(records, 0, iterations[-1]))
    return page
