"""SchedulerLoop: one turn of the scheduler process. It takes a bounded number of messages, steps, and says
how long the process may sleep.

It never spins: after a turn without work the process sleeps until a message comes. When it becomes idle it
checks once that nothing was lost. A violation is reported and counted, and the process continues.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import NamedTuple

from runtime.ring.process import HEARTBEAT_S
from runtime.ring.tenants import Tenants
from runtime.wire.messages import AbortRequest, ToScheduler
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.waiting.waiting_room import WaitingRoom

logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_STEP = 256
MAX_ABORTS_PER_STEP = 1 << 13
"""Number of handles in aborts with which a step has enough: further messages wait for the next one. A handle
that nobody knows takes 1.2 us, and a message may have 4,096.
"""
RETRY_S = 0.002
"""Seconds of sleep when requests are live but nothing can be done: a detokenizer has no room, or a feature is
not ready. So short that deadlines need no timer.
"""
PAUSED_S = 0.02
"""Seconds of sleep while generation is paused, or if only messages can help. A deadline may be late by as
much.
"""
CHECK_AFTER_IDLE_S = 1.0


class SchedulerLoad(NamedTuple):
    """Figures that are shown as soon as they change: the load by which tokenizers admit requests, the size of
    the newest step, the sequence that runs alone, and whether generation is paused.
    """

    num_running: int
    num_waiting: int
    num_received: int
    batch_size: int
    solitary: bytes
    is_paused: bool


class SchedulerLoop:
    """Work loop of the process. Call `turn` until told to stop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._port = scheduler.port
        self._idle_since = self._port.now_s()
        self._is_checked = True
        self._reads = True
        self._unhandled: list[ToScheduler] = []
        """Messages that were read and wait for the next turn."""
        self._waits_for_masks = False
        """True if the last turn has taken all masks that had come, and others are to come."""
        self.num_failed_checks = 0
        self._keep_accounts()

    def turn(self) -> float:
        """Take one turn. Returns the seconds to wait for a message before the next turn; 0.0: there is
        work.
        """
        # While there is no room for answers, no message is read. Requests then wait in the tokenizers, which
        # can refuse them.
        self._reads = not self._scheduler.output.is_full
        messages = self._next_messages() if self._reads else []
        worked = self._scheduler.step(messages)
        now = self._port.now_s()
        if now >= self._accounts_at:
            self._keep_accounts()
        if worked or messages:
            self._idle_since = now
            self._is_checked = False
            return 0.0
        self._waits_for_masks = self._scheduler.waits_for_masks
        if not self._scheduler.is_idle:
            return PAUSED_S if self._scheduler.controls.is_paused or self._waits_for_masks else RETRY_S
        if not self._is_checked and now - self._idle_since >= CHECK_AFTER_IDLE_S:
            self._check()
        return HEARTBEAT_S / 2

    def _next_messages(self) -> list[ToScheduler]:
        messages = self._unhandled or self._port.drain(MAX_MESSAGES_PER_STEP)
        self._unhandled = []
        num_aborts = 0
        for place, message in enumerate(messages, 1):
            if isinstance(message, AbortRequest):
                num_aborts += len(message.handles)
                if num_aborts >= MAX_ABORTS_PER_STEP:
                    self._unhandled = messages[place:]
                    return messages[:place]
        return messages

    def rest(
        self,
        timeout_s: float,
        wait_for_message: Callable[[float], object],
        wait_for_masks: Callable[[float], object],
        sleep: Callable[[float], object],
    ) -> None:
        """Sleep for as long as a turn has said, or until a message comes. wait_for_masks: returns when masks
        come, too. What was left unread does not wake it, because it may stay there for long.
        """
        if not self._reads:
            sleep(timeout_s)
        elif self._waits_for_masks:
            wait_for_masks(timeout_s)
        else:
            wait_for_message(timeout_s)

    def _keep_accounts(self) -> None:
        """Apply new limits of tenants, charge tenants, and take what the grammar process has sent: twice in
        each heartbeat.
        """
        self._accounts_at = self._port.now_s() + HEARTBEAT_S / 2
        take_tenants(self._port.new_tenants(), self._scheduler.lifecycle.room)
        self._scheduler.lifecycle.accounts.settle()
        self._scheduler.masks.look()

    def _check(self) -> None:
        """Assert that pages, rows and sequences are all accounted for, and do work that is too slow for a
        busy loop.
        """
        self._is_checked = True
        self._scheduler.capacity.note_idle()
        try:
            self._scheduler.kv.check()
            self._scheduler.lifecycle.check()
        except AssertionError:
            self.num_failed_checks += 1
            logger.exception("self-check failed (%d so far); going on", self.num_failed_checks)
        gc.collect()  # automatic collection is off; the scheduler leaves no cycles, but libraries may

    def now_s(self) -> float:
        """Return the time of the last turn."""
        return self._port.now_s()

    def load(self) -> SchedulerLoad:
        scheduler = self._scheduler
        return SchedulerLoad(
            scheduler.kv.rows.num_running,
            len(scheduler.lifecycle.room),
            scheduler.intake.num_received,
            scheduler.step_log.batch_size,
            scheduler.lifecycle.solitary.shown,
            scheduler.controls.is_paused,
        )

    def progress(self) -> dict[str, int]:
        """Return the number of steps, by which the launcher tells a slow worker from a stuck one."""
        return {"num_launched": self._scheduler.num_steps, "num_finished": self._scheduler.num_committed}

    def status(self) -> dict[str, int | float | bytes]:
        """Return the scheduler's fields of its slot on the status page."""
        lifecycle, kv = self._scheduler.lifecycle, self._scheduler.kv
        return {
            **self.load()._asdict(),
            **self.progress(),
            "queued_prompt_tokens": lifecycle.room.num_tokens(),
            "num_free_pages": kv.num_available,
            "num_pages": kv.pages.num_pages,
            "tokens_per_s": self._scheduler.step_log.tokens_per_s(),
            "max_len": kv.rows.tokens.shape[1],
            "is_profiling": self._scheduler.profile.is_on,
            "is_in_call": self._scheduler.controls.calls.is_open,
        }


def take_tenants(tenants: Tenants | None, room: WaitingRoom) -> None:
    """Apply a new table of tenants. None: it has not changed."""
    if tenants is not None:
        room.change_tenants(tenants)
        if tenants.tenants:
            logger.info("The limits of %d tenants are in force", len(tenants.tenants))
