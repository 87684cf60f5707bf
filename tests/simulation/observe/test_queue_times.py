"""Records of the time that requests wait in the scheduler."""

from __future__ import annotations

import msgspec

from runtime.wire.messages import ControlRequest
from scheduler_proc.observe.queue_times import BOUNDS_S, QueueTimes
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running

PROMPT = [1, 2, 3, 4, 6]


def test_a_wait_falls_under_the_first_bound_that_is_not_below_it() -> None:
    times = QueueTimes()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1] * 2):
        times.add(seconds)
    assert times.counts[:2] == [2, 1]
    assert times.counts[-1] == 1
    assert sum(times.counts) == 4
    assert times.sum_s == BOUNDS_S[0] * 2.01 + BOUNDS_S[-1] * 2


def test_every_request_that_ran_has_waited_once() -> None:
    with running() as system:
        run_until_idle(system, *(message(number, PROMPT) for number in (1, 2, 3)))
        run_until_idle(system, ControlRequest(7, 1, "server_info"))
        (reply,) = system.detokenizer.replies
        info = msgspec.msgpack.decode(reply.body)
        assert len(info["queue_time_counts"]) == len(info["queue_time_bounds_s"]) + 1
        assert sum(info["queue_time_counts"]) == 3
        system.check_empty()
