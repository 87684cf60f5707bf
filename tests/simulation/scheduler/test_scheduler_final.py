"""When the end of a sequence is told, everything it held is free: not a step later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runtime.wire.format import Message
from runtime.wire.handle import sequence_key
from runtime.wire.messages import AbortRequest, Closed, StopMatched, TokenBatch
from runtime.wire.transport import Frame
from tests.harness.scheduler.scheduler_parts import message, running
from tests.harness.simulation.sim_system import STEP_S, System

PROMPT = list(range(3, 20))


class Watcher:
    """Stands before the way to the detokenizer and looks at the scheduler each time an end passes."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._send = system.outbox.send
        self.closed: list[Closed] = []
        system.outbox.send = self.send  # type: ignore[method-assign]

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> bool:
        if isinstance(message, TokenBatch) and message.closed:
            system = self._system
            for closed in message.closed:
                assert sequence_key(closed.handle) not in system.lifecycle.requests
                assert closed.handle not in [req.handle for req in system.rows.running_requests()]
            system.kv.check()
            self.closed += message.closed
            if not system.lifecycle.requests:
                assert system.rows.num_free == system.rows.max_rows
                assert system.kv.num_available == system.kv.pages.num_pages
                assert not system.slots.num_used
        return self._send(message, frames)


def run_to_the_ends(system: System, watcher: Watcher, count: int) -> None:
    for _ in range(200):
        if len(watcher.closed) == count:
            return
        system.step()
    raise AssertionError("no end")


@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("ending", ["length", "abort", "stop_string", "timeout"])
def test_what_it_held_is_free_before_its_end_is_told(ending: str, depth: int, cache: str) -> None:
    with running(depth=depth, cache=cache, max_len=96) as system:
        watcher = Watcher(system)
        long = ending != "length"
        first = message(
            1, PROMPT, 60 if long else 9, deadline_s=system.now + 8 * STEP_S if ending == "timeout" else 0.0
        )
        other = message(2, PROMPT[:5], 5)
        assert system.inbox.send(first)
        assert system.inbox.send(other)
        for _ in range(5):
            system.step()
        early: dict[str, Any] = {
            "abort": AbortRequest((first.handle,)),
            "stop_string": StopMatched(first.handle, 1),
        }
        if ending in early:
            assert system.inbox.send(early[ending])
        run_to_the_ends(system, watcher, 2)
        reasons = {closed.handle: closed.reason for closed in watcher.closed}
        assert reasons == {first.handle: ending, other.handle: "length"}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_only_row_can_be_had_again_at_once(depth: int) -> None:
    with running(depth=depth, max_rows=1, max_live=1) as system:
        watcher = Watcher(system)
        for number in range(4):
            assert system.inbox.send(message(number, PROMPT))
            run_to_the_ends(system, watcher, number + 1)
            assert watcher.closed[-1].reason == "length"
