"""An engine that gives way to one with other weights: what it has computed goes out, and no more is begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from runtime.wire.messages import Closed, ControlRequest, ErrorInfo, GiveWay
from runtime.wire.plan import WeightsUpdate
from runtime.wire.transport import Frame
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import System

REQUESTS = [message(number, [number] * 9, max_tokens=12) for number in range(6)]
"""More than there are rows."""
UPDATE = ControlRequest(7, 1, "update_weights", weights=WeightsUpdate("step-1"))
HERE = GiveWay(1)


class ToLauncher:
    """The launcher's inbox."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.messages: list[Any] = []
        self._has_room = has_room

    def send(self, message: Any, frames: Sequence[Frame] = ()) -> bool:
        if self._has_room:
            self.messages.append(message)
        return self._has_room

    def close(self) -> None: ...


def connect(system: System, *, has_room: bool = True) -> ToLauncher:
    """Let requests for other weights pass."""
    launcher = ToLauncher(has_room=has_room)
    controls = system.scheduler.controls
    controls._to_launcher, controls._epoch = launcher, HERE.epoch
    return launcher


def refusal(system: System) -> ErrorInfo:
    """Return the last reply, which is an error."""
    reply = system.detokenizer.replies[-1]
    assert not reply.ok
    return msgspec.msgpack.decode(reply.body, type=ErrorInfo)


def reasons(system: System) -> list[str]:
    closed: list[Closed] = list(system.detokenizer.closed.values())
    return [each.reason for each in closed]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("aborts", [False, True])
def test_steps_in_flight_are_committed_and_no_other_is_launched(depth: int, aborts: bool) -> None:
    with running(depth=depth) as system:
        launcher = connect(system)
        for each in (*REQUESTS, UPDATE):
            system.inbox.send(each)
        for _ in range(4):
            system.step()
        assert launcher.messages == [UPDATE]
        num_steps = system.scheduler.num_steps
        system.inbox.send(GiveWay(HERE.epoch, aborts=aborts))
        while not system.scheduler.has_given_way:
            system.step()
        assert system.scheduler.num_steps == system.scheduler.num_committed == num_steps
        assert reasons(system) == (["abort"] * len(REQUESTS) if aborts else [])
        assert len(system.lifecycle.requests) == (0 if aborts else len(REQUESTS))
        told = sum(map(len, system.detokenizer.tokens.values()))
        assert told > 0
        if not aborts:
            assert told == sum(each.num_output for each in system.lifecycle.requests.values())


def test_a_message_for_another_engine_or_out_of_nowhere_changes_nothing() -> None:
    with running() as system:
        connect(system)
        for each in (HERE, UPDATE, GiveWay(HERE.epoch + 1), GiveWay(0, aborts=True)):
            run_until_idle(system, each)
        run_until_idle(system, *REQUESTS)
        assert not system.scheduler.has_given_way
        assert reasons(system) == ["length"] * len(REQUESTS)
        run_until_idle(system, HERE)
        assert system.scheduler.has_given_way


def test_a_request_for_other_weights_is_refused_by_reason() -> None:
    with running() as system:
        run_until_idle(system, UPDATE)
        assert (refusal(system).status, "--weights-dir" in refusal(system).message) == (403, True)
        launcher = connect(system)
        run_until_idle(system, ControlRequest(7, 2, "update_weights"))
        assert refusal(system).param == "weights"
        assert launcher.messages == []
        connect(system, has_room=False)
        run_until_idle(system, UPDATE, HERE)
        assert refusal(system).status == 503
        assert not system.scheduler.has_given_way


def test_ends_say_by_which_weights() -> None:
    with running() as system:
        system.lifecycle._weight_version = "step-7"
        run_until_idle(system, *REQUESTS)
        closed: list[Closed] = list(system.detokenizer.closed.values())
        assert {each.weight_version for each in closed} == {"step-7"}
