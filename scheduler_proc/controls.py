"""Controls: what operators tell a scheduler that runs: pause and go on, take a profile."""

from __future__ import annotations

import logging

from runtime.messages import ControlRequest
from scheduler_proc.lifecycle import Lifecycle
from scheduler_proc.step_profile import StepProfile

logger = logging.getLogger(__name__)

PauseAnswer = dict[str, str | int | bool]


class Controls:
    """`is_paused`: no step is launched. Those in flight are committed, and all that comes is received."""

    def __init__(self, lifecycle: Lifecycle, profile: StepProfile | None = None) -> None:
        self.is_paused = False
        self.profile = profile or StepProfile(None)
        self._lifecycle = lifecycle

    def answer(self, message: ControlRequest) -> PauseAnswer | dict[str, str | int]:
        """Do what is asked. Raises RequestError that says why it cannot be."""
        match message.op:
            case "pause_generation":
                return self._pause(message.mode)
            case "continue_generation":
                return self._continue()
            case "start_profile":
                return self.profile.start(message.num_steps)
            case "stop_profile":
                return self.profile.stop()
        raise AssertionError(message.op)

    def _pause(self, mode: str) -> PauseAnswer:
        """Pause, also when it is paused already: the mode may ask for more than the last one did.

        in_place  running requests keep their rows and pages
        retract   they give them up, so that all of the cache can be flushed, and compute them again
        abort     everything that lives ends
        """
        self.is_paused = True
        if mode == "retract":
            for req in self._lifecycle.kv.rows.running_requests():
                self._lifecycle.retract(req)
        elif mode == "abort":
            for req in list(self._lifecycle.requests.values()):
                self._lifecycle.finish(req, "abort")
        return self._said(f"paused ({mode})")

    def _continue(self) -> PauseAnswer:
        self.is_paused = False
        return self._said("going on")

    def _said(self, what: str) -> PauseAnswer:
        num_running = self._lifecycle.kv.rows.num_running
        num_waiting = len(self._lifecycle.waiting)
        logger.info("Generation is %s, #running-req: %d, #queue-req: %d", what, num_running, num_waiting)
        return {"is_paused": self.is_paused, "num_running": num_running, "num_waiting": num_waiting}
