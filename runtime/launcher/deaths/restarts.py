"""Restarts: starts the processes of a launch, and starts those that have ended again, under the next epoch.

The processes of a unit end and start together. What a death means for the requests that were there, and how
many restarts are left, is decided in Deaths.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence

from runtime.base.errors import EXIT_INTERNAL, StartError
from runtime.launcher.children import Children
from runtime.launcher.deaths.death_causes import Deaths
from runtime.launcher.hosts.host import ENGINE, Child, ProcessPlace, describe_exit, places
from runtime.launcher.launch_names import LaunchNames
from runtime.launcher.launch_status import LaunchStatus
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import ProcessFailed

logger = logging.getLogger(__name__)

BEAT_S = 0.1
"""Seconds between signs of life while a process takes its time to end."""
NODE_NEWS_S = 0.5
"""Seconds to wait for news of ranks on other nodes when a rank has failed here."""


class Restarts:
    def __init__(
        self,
        config: RuntimeConfig,
        names: LaunchNames,
        children: Children,
        status: LaunchStatus,
        deaths: Deaths,
    ) -> None:
        """Act for one launch, whose processes are `children`. Nothing is started yet."""
        self._config = config
        self._page, self._records = names.page, names.records
        self._weights, self._nodes = names.weights, names.nodes
        self._nodes_file = names.endpoints.nodes_file
        self._children = children
        self._status = status
        self._deaths = deaths
        self._last_words: dict[str, ProcessFailed] = {}
        """Reason that a process gave for its coming end, by its name."""

    @property
    def may_restart(self) -> bool:
        """False while starting, since a process that cannot start will not the second time either, and while
        everything is being ended.
        """
        serves = self._status.state in ("ready", "draining") and not self._status.ends_at_once
        return self._config.restart == "auto" and serves

    def start(self, place: ProcessPlace) -> None:
        """Start the process of a place. Raises StartError if that fails."""
        self._last_words.pop(place.name, None)
        epoch = self._status.epoch
        child = self._children.start(place, epoch)
        self._records.event("spawn", process=place.name, pid=child.pid, epoch=epoch)

    # -- ends ------------------------------------------------------------------------------------------------

    def note_last_words(self, reason: ProcessFailed) -> None:
        """Record the reason that a process gives for its coming end."""
        self._last_words[reason.role] = reason
        if not self.may_restart:
            self._status.fail(reason)

    def has_last_words(self, child: Child) -> bool:
        """Return True if the process has given a reason for its end."""
        return child.place.name in self._last_words

    def kill_hung(self, child: Child, reason: str, *, is_stopped: bool) -> None:
        """Kill a process that hangs. is_stopped: a signal from outside has stopped it."""
        name = child.place.name
        logger.warning("%s hangs: %s; it is killed", name, reason)
        self._records.event("hang", process=name, pid=child.pid, reason=reason)
        self._last_words[name] = ProcessFailed(name, reason, EXIT_INTERNAL)
        if not is_stopped:
            self._deaths.note_hang(child)
        child.kill()

    def reap(self, child: Child) -> int:
        """Reap a child and mark its slot of the status page as gone. The other fields keep their last values.
        Returns the exit code, or minus the signal number.
        """
        child.is_ready = self._was_ready(child)
        code = self._children.reap(child)
        self._records.event(
            "exit",
            process=child.place.name,
            pid=child.pid,
            code=code if code >= 0 else None,
            signal=signal.Signals(-code).name if code < 0 else None,
        )
        slot = self._page.read(child.place.role, child.place.index)
        if self.may_restart and slot.epoch == child.epoch:
            self._page.write(child.place.role, slot._replace(state="restarting"), child.place.index)
        return code

    def replace(self, child: Child, code: int) -> None:
        """Replace a child that has been reaped, with its unit, or let the launch fail. It was not asked to
        end, so its end is a fault, whatever its exit code.
        """
        name = child.place.name
        failure = self._last_words.pop(name, None) or ProcessFailed(
            name, f"the process {describe_exit(code)}", EXIT_INTERNAL
        )
        if not self.may_restart:
            self._status.fail(failure)
        elif child.place.unit == ENGINE and self._weights.awaits_end:
            self._replace_engine(child, failure)
        else:
            self._restart(child, code, failure)

    def _replace_engine(self, child: Child, failure: ProcessFailed) -> None:
        """Start an engine with other weights in the place of one that has ended for them. It does not count
        as a restart.
        """
        others = self._children.of_unit(ENGINE)
        deadline = time.monotonic() + self._weights.grace_s
        for other in others:
            while not other.has_ended(BEAT_S) and time.monotonic() < deadline:
                self._status.beat()
        self._end(others)
        if all(each.is_ready for each in (child, *others)):
            self._deaths.note_end(child.place)
        reason = self._weights.engine_ended(f"{failure.role}: {failure.message}")
        logger.info("the engine is replaced: %s", reason)
        self._start_again(ENGINE, reason, time.monotonic())

    def _restart(self, child: Child, code: int, failure: ProcessFailed) -> None:
        unit, limit = child.place.unit, self._max_restarts_of(child.place)
        seen_at = time.monotonic()
        others = self._children.of_unit(unit)
        if code > 0:
            self._wait_for_node_news(others)
        died_by_itself = self._deaths.may_be_a_request((child, *others), code)
        was_ready = all(map(self._was_ready, (child, *others)))
        self._end(others)
        try:
            delay_s = self._deaths.spend_restart(
                child.place, limit, by_itself=died_by_itself, was_ready=was_ready
            )
        except StartError as spent:
            self._records.event("budget_spent", unit=unit, restarts=limit)
            self._status.fail(ProcessFailed(failure.role, f"{failure.message}; {spent}", EXIT_INTERNAL))
            return
        epoch = self._status.epoch + 1
        logger.warning("%s: %s; restarting %s (epoch %d)", failure.role, failure.message, unit, epoch)
        self._start_again(unit, failure.message, seen_at, delay_s)

    def _was_ready(self, child: Child) -> bool:
        """Return True if a child was ready, by its message or by the status page. Clients send as soon as the
        page says so, and the message may arrive after the death.
        """
        slot = self._page.read(child.place.role, child.place.index)
        return child.is_ready or (slot.epoch == child.epoch and slot.state == "ready")

    def _wait_for_node_news(self, others: Sequence[Child]) -> None:
        """Wait briefly for news of ranks on other nodes. A rank that was killed from outside also ends those
        of this node, whose ends are noticed sooner.
        """
        deadline = time.monotonic() + NODE_NEWS_S
        for other in others:
            while other.place.node and not other.has_ended(BEAT_S) and time.monotonic() < deadline:
                self._status.beat()

    def _end(self, children: Sequence[Child]) -> None:
        for child in children:
            child.kill()
        for child in children:
            while not child.has_ended(BEAT_S):
                self._status.beat()  # a large process may take longer to end than the heartbeat allows
            self.reap(child)

    # -- starts ----------------------------------------------------------------------------------------------

    def _start_again(self, unit: str, reason: str, seen_at: float, delay_s: float = 0.0) -> None:
        """Schedule the start of a unit that has ended, under the next epoch."""
        self._status.epoch += 1
        self._records.event(
            "restart", unit=unit, reason=reason, epoch=self._status.epoch, delay=round(delay_s, 3)
        )
        empty = [place for place in places(self._config) if place.unit == unit]
        self._children.due.update(dict.fromkeys(empty, seen_at + delay_s))
        self._status.write()

    def start_due(self) -> None:
        """Start the processes whose time has come."""
        if self._status.ends_at_once:
            return
        now = time.monotonic()
        due = [place for place, at in self._children.due.items() if at <= now]
        due = self._without_missing_nodes(due, now)
        for place in due:
            del self._children.due[place]
            try:
                self.start(place)
            except StartError as error:
                self._start_later(place, error)
        if due:
            if self._nodes is not None:
                self._nodes.turn()  # agents get their orders now instead of after the next poll
            self._status.write()

    def _start_later(self, place: ProcessPlace, error: StartError) -> None:
        """Try again to start a process for which the system had no resources. Each try counts as a
        restart.
        """
        limit = self._max_restarts_of(place)
        try:
            delay_s = self._deaths.spend_restart(place, limit, by_itself=True, was_ready=False)
        except StartError:
            self._status.fail(ProcessFailed(place.name, str(error), EXIT_INTERNAL))
        else:
            logger.warning("%s; tried again in %g s", error, delay_s)
            self._children.due[place] = time.monotonic() + delay_s

    def _max_restarts_of(self, place: ProcessPlace) -> int:
        config = self._config
        return config.max_engine_restarts if place.unit == ENGINE else config.max_restarts

    def _without_missing_nodes(self, due: list[ProcessPlace], now: float) -> list[ProcessPlace]:
        """Leave out the engine while one of its nodes is missing. If the node does not return, the launch
        ends.
        """
        engine = [place for place in due if place.unit == ENGINE]
        if self._nodes is None or not engine:
            return due
        if not self._nodes.missing:
            self._nodes.write_addresses(self._nodes_file)
            return due
        if now - self._children.due[engine[0]] > self._config.start_timeout:
            self._status.fail(ProcessFailed("nodes", self._nodes.absence, EXIT_INTERNAL))
        return [place for place in due if place.unit != ENGINE]
