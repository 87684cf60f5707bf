"""LaunchStatus: the state of a launch as a whole, and how others are told of it, by the launcher's slot of
the status page, state.json and events.jsonl.

It owns the state, the epoch, the failure that ends the launch, and the facts that processes have reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from runtime.base.errors import EXIT_OK
from runtime.launcher.children import Children
from runtime.launcher.launch_names import LaunchNames
from runtime.launcher.launch_signals import LaunchSignals
from runtime.ring.launch_state import ChildState, LaunchState
from runtime.ring.process import FIRST_EPOCH
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import ProcessFailed
from runtime.wire.status_page import ProcessStatus


class LaunchStatus:
    def __init__(
        self,
        config: RuntimeConfig,
        names: LaunchNames,
        children: Children,
        signals: LaunchSignals,
        restarts: Mapping[str, int],
    ) -> None:
        """restarts: number of restarts by unit, which grows meanwhile. Nobody is told anything yet."""
        self._config = config
        self._names = names
        self._children = children
        self._signals = signals
        self._restarts = restarts
        self.state = "loading"
        """State of the launch, as in LaunchState."""
        self.epoch = FIRST_EPOCH
        """Epoch of the processes that are started now. Each restart takes the next."""
        self.failure: ProcessFailed | None = None
        """First failure, which ends the launch."""
        self.info: dict[str, int | float | str] = {}
        """Facts that processes reported when they became ready, such as num_pages."""
        self._recovery_ns = 0

    @property
    def is_stopping(self) -> bool:
        """True once the launch is to end, perhaps after requests have finished."""
        return self.failure is not None or self._signals.num_stops > 0

    @property
    def ends_at_once(self) -> bool:
        """True if signals ask for an end that no request delays: any while starting, later the second one."""
        return self._signals.num_stops > (0 if self.state == "loading" else 1)

    def fail(self, failure: ProcessFailed) -> None:
        """Let the launch fail. Only the first failure is reported. Processes that were told to end at once
        have not failed.
        """
        if self.failure is None and not self.ends_at_once:
            self.failure = failure

    def enter(self, state: str) -> None:
        """Change the state, and tell others."""
        self.state = state
        records = self._names.records
        records.event("state", state=state, reason=self.failure.message if self.failure else None)
        # HTTP servers answer by the slot of the status page, so it is written before the file: a client that
        # reads a state in the file is then answered accordingly. A failure is the exception: a client that
        # sees it in the slot must find the reason in the file. Likewise nobody is told that the ring is ready
        # before the file says so.
        if state != "failed":
            self.beat()
        self.write()
        if state in ("ready", "failed"):
            records.wait_written()
        self.beat()

    def beat(self) -> None:
        """Write the launcher's slot of the status page, which is its sign of life."""
        if self.epoch > FIRST_EPOCH and not self._children.are_complete:
            self._recovery_ns = time.monotonic_ns()
        status = ProcessStatus(
            self.epoch,
            os.getpid(),
            self.state,
            time.monotonic_ns(),
            recovery_ns=self._recovery_ns,
        )
        self._names.page.write("launcher", status)

    def write(self) -> None:
        """Replace state.json by one with the present state."""
        config, names, failure = self._config, self._names, self.failure
        state = LaunchState(
            launch_id=names.run_dir.path.name,
            state=self.state,
            epoch=self.epoch,
            pid=os.getpid(),
            guardian_pid=names.guardian.pid,
            host=config.host,
            port=names.port,
            zmq_bind=config.zmq_bind,
            model=config.model_names[0],
            children=self._children_now(),
            restarts=self._restarts,
            info=self.info,
            error=f"{failure.role}: {failure.message}" if failure else "",
            exit_code=failure.exit_code if failure else EXIT_OK,
        )
        names.records.state(state)

    def _children_now(self) -> list[ChildState]:
        running = [(child.place, child.pid, child.epoch, child.is_ready) for child in self._children]
        empty = [(place, 0, self.epoch, False) for place in self._children.due]
        return [
            ChildState(place.role, place.index, pid, epoch, is_ready, place.node)
            for place, pid, epoch, is_ready in (*running, *empty)
        ]
