"""Planted mistakes in waiting times and their consequences: see tests.harness.mutants.mutant_table."""

from __future__ import annotations

from scheduler_proc.batching.admission import Admission
from scheduler_proc.batching.preemption import Preemption
from scheduler_proc.waiting.deadlines import Deadlines
from scheduler_proc.waiting.serving_time import ServingTime
from scheduler_proc.waiting.waiting_queue import WaitingQueue
from scheduler_proc.waiting.waiting_room import Patience, WaitingRoom
from tests.harness.mutants.mutant_table import Mutant

STARVING = {"patience": Patience(0.055, 0.0), "max_rows": 2, "turbulence": 0.3, "request_scheduler": ""}
TIMED_OUT = {"patience": Patience(0.0, 0.255), "max_rows": 2, "turbulence": 0.3, "request_scheduler": ""}
PREEMPTING = STARVING | {"capacity": "max_utilization", "policy": "priority"}

WAITING_MUTANTS = [
    Mutant(
        "who starves stays where it stood",
        WaitingRoom,
        "_put_forward_starved",
        "self.queue.add(req)",
        "self.queue.put(req)",
        0,
        changes=STARVING,
    ),
    Mutant(
        "who starves is found a step late",
        WaitingRoom,
        "_put_forward_starved",
        "- self._patience.max_starvation_s",
        "- self._patience.max_starvation_s - 0.01",
        0,
        changes=STARVING,
    ),
    Mutant(
        "waiting is measured through pauses",
        ServingTime,
        "now",
        "self._paused_at if self.is_paused else self._clock()",
        "self._clock()",
        0,
        changes=STARVING,
    ),
    Mutant(
        "pauses that have ended count as waiting",
        ServingTime,
        "resume",
        "self._paused_s += self._clock() - self._paused_at",
        "pass",
        0,
        changes=STARVING,
    ),
    Mutant(
        "what was waited before an earlier row is forgotten",
        WaitingRoom,
        "_count_from",
        "now - req.waited_s",
        "now",
        0,
        changes=PREEMPTING,
    ),
    Mutant(
        "the policy orders those that starve, too",
        Admission,
        "order",
        "if not num_starved",
        "if True",
        0,
        changes=STARVING
        | {"policy": "tests.harness.models.stand_ins:RandomPolicy", "capacity": "max_utilization"},
    ),
    Mutant(
        "among those that starve the latest goes first",
        WaitingQueue,
        "give_place",
        "req.waits_from_s, req.seq",
        "-req.waits_from_s, req.seq",
        0,
        changes=STARVING,
    ),
    Mutant(
        "who has starved gives way to a higher priority",
        Preemption,
        "_victims_of",
        "each.urgency < req.priority",
        "each.priority < req.priority",
        19,
        changes=PREEMPTING,
    ),
    Mutant(
        "an earlier stay in the queue has its time kept",
        Deadlines,
        "_find",
        " and self._time_of(req) == at",
        "",
        0,
        changes=PREEMPTING,
    ),
    Mutant(
        "given up after it has begun",
        WaitingRoom,
        "_take_given_up",
        " and not req.num_retractions",
        "",
        0,
        changes=TIMED_OUT | {"capacity": "max_utilization", "policy": "priority"},
    ),
    Mutant(
        "who comes while others wait is never looked at",
        WaitingRoom,
        "_keep_deadlines",
        "self._keep_starvation(req)",
        "pass",
        0,
        changes=STARVING,
    ),
    Mutant(
        "the next one that is due is forgotten",
        WaitingRoom,
        "tick",
        "min(self._starving.first + max_starvation_s, self._not_begun.first + queue_timeout_s)",
        "math.inf",
        0,
        changes=STARVING,
    ),
    Mutant(
        "the queue timeout begins anew for each that comes",
        WaitingRoom,
        "_forget_if_empty",
        "if not len(self):",
        "if True:",
        0,
        changes=TIMED_OUT,
    ),
]
