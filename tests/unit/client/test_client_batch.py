"""carousel.client.core.batch: when prompts that found no room are tried again. The session and the clock are
the test's.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from carousel.client.core import batch as batch_module
from carousel.client.core.batch import CompletionBatch
from carousel.client.core.mailbox import Put
from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.submission import Submission
from carousel.client.core.state.request_state import RequestState
from runtime.base.errors import Overloaded
from runtime.wire.handle import make_handle
from runtime.wire.messages import Finish, SequenceOutput, Usage


class FakeSession:
    """Answers at once what it lets in. Its connection is itself."""

    error = None

    def __init__(self, has_room: Iterator[bool], refusals: int = 0) -> None:
        self.connection = self
        self.refusals = refusals
        self._has_room = has_room
        self._number = 0

    @property
    def has_room(self) -> bool:
        return next(self._has_room)

    def max_in_flight(self) -> int:
        return 4

    def submit(self, submission: Submission, put: Put) -> RequestState:
        if self.refusals:
            self.refusals -= 1
            raise Overloaded("another thread was first")
        self._number += 1
        request = build_request(make_handle(1, self._number), submission)
        put(SequenceOutput(request.handle, "done", finish=Finish("stop", Usage(1, 1))))
        return RequestState(request, submission.sampling, put)

    def forget(self, number: int) -> None:
        raise AssertionError("a batch that goes well leaves nothing")


def run(session: Any, num_prompts: int = 2) -> list[str]:
    submissions = [Submission("x")] * num_prompts
    return [each.text for each in CompletionBatch(session, submissions, None, lambda _: None).run()]


def test_a_thread_held_up_until_there_is_room_again_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is in flight that could wake it, and the time to try again passes while it does not run."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            self.now += 1.0
            return self.now

    class NeverForEver(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            assert timeout is not None or not self.empty(), "nothing will ever come"
            return super().get(block, 0.0)

    monkeypatch.setattr(batch_module, "time", Clock())
    monkeypatch.setattr(batch_module, "SimpleQueue", NeverForEver)
    assert run(FakeSession(itertools.chain([False], itertools.repeat(True)))) == ["done"] * 2


def test_room_that_another_thread_took_first_ends_nothing() -> None:
    assert run(FakeSession(itertools.repeat(True), refusals=2)) == ["done"] * 2
