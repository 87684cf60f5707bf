"""Supervisor: starts the processes of a ring, watches them, replaces those that die or hang, and ends them
all.

A child that dies before all have been ready ends the launch with its error. One that dies later is started
again under the next epoch; the engine's processes are restarted together. With `--restart never`, or after
too many restarts, the ring ends and all callers get errors.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence

import zmq

from runtime.base.console import write_error, write_line
from runtime.base.errors import EXIT_CONFIG, EXIT_DRAIN_CUT, EXIT_INTERNAL, EXIT_OK, ConfigError, StartError
from runtime.base.wake import Wake
from runtime.launcher.children import CHILD_EXIT_S, LAST_WORDS_MS, STOP_SIGNALS, Children
from runtime.launcher.deaths.death_causes import Deaths
from runtime.launcher.drain import Drain
from runtime.launcher.hosts.host import ENGINE, Child, ProcessPlace, describe_exit, places
from runtime.launcher.hosts.local import LocalHost, WatchedProcess
from runtime.launcher.launch_names import LaunchNames
from runtime.launcher.watchdog import Watchdog
from runtime.ring.launch_state import ChildState, LaunchState, write_atomically
from runtime.ring.process import FIRST_EPOCH
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import ControlRequest, ProcessFailed, ProcessReady
from runtime.wire.status_page import ProcessStatus

logger = logging.getLogger(__name__)

POLL_S = 0.1
FAILURE_NOTICE_S = 0.3
"""Seconds for which a failed ring keeps its sockets, so that callers can read the reason on the status page.
"""
API_EXIT_S = 1.0
"""Seconds that HTTP servers have to finish their answers at the end of a launch."""
NODE_NEWS_S = 0.5
"""Seconds to wait for news of ranks on other nodes when a rank has failed here."""


class Supervisor:
    def __init__(self, config: RuntimeConfig) -> None:
        """Set up signals, the run directory and the HTTP port. Raises AddressInUse, ConfigError or
        StartError, with nothing left behind.
        """
        self.config = config
        self.info: dict[str, int | float | str] = {}
        """Facts that processes reported when they became ready, such as num_pages."""
        self._epoch = FIRST_EPOCH
        self._failure: ProcessFailed | None = None
        self._num_signals = 0
        self._wake = Wake()
        self._state = "loading"
        self._drain: Drain | None = None
        self._recovery_ns = 0
        self._names_of_processes = frozenset(place.name for place in places(config))
        self._last_words: dict[str, ProcessFailed] = {}
        """Reason that a process gave for its coming end, by its name."""
        self._due: dict[ProcessPlace, float] = {}
        """Empty places, and the time at which each is filled again."""
        self._parent = WatchedProcess(config.parent_pid, "parent_pid")
        self._children = Children({})  # a second signal may come before there are any, and asks for them
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        if config.has_key_files:
            signal.signal(signal.SIGHUP, self._on_hangup)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
            signal.signal(signal.SIGHUP, self._on_signal)
        self._keys_are_due = False
        self.names = LaunchNames(config)
        self._page, self._records = self.names.page, self.names.records
        self._deaths = Deaths(self.names.endpoints, self._page, config.restart_window)
        self._poller = zmq.Poller()
        self._poller.register(self.names.inbox.socket, zmq.POLLIN)
        self._poller.register(self._wake.fd, zmq.POLLIN)
        nodes = self._nodes = self.names.nodes
        if nodes is not None:
            self._poller.register(nodes.socket, zmq.POLLIN)
        listeners = {"api": self.names.http, "worker": nodes.meeting if nodes else None}
        local = LocalHost(self.names.run_dir.path, self._poller, listeners)
        self._children = Children({0: local, **(nodes.hosts if nodes else {})})
        self._watchdog = Watchdog(self._page, config)
        self._weights = self.names.weights
        self._weights.wake = self._wake.set

    def run(self) -> int:
        """Start all processes, serve until a signal or a death that cannot be repaired, and stop. Returns the
        exit code. Raises ConfigError when the run directory cannot be written, StartError when no process can
        be started.
        """
        try:
            self._start()
            if not self._stopping:
                self._announce()
                self._serve()
            if self._failure is not None:
                self._set_state("failed")
                time.sleep(FAILURE_NOTICE_S)
        finally:
            self._stop()
        if self._failure is not None:
            write_error(f"{self._failure.role}: {self._failure.message}")
            return self._failure.exit_code
        if self._drain is not None and self._drain.was_cut:
            write_error("stopped before all requests had finished")
            return EXIT_DRAIN_CUT
        return EXIT_OK

    @property
    def _stopping(self) -> bool:
        return self._failure is not None or self._num_signals > 0

    @property
    def _ends_at_once(self) -> bool:
        return self._num_signals > (0 if self._state == "loading" else 1)

    def _on_signal(self, *_: object) -> None:
        self._num_signals += 1
        self._wake.set()
        is_draining = self._drain is not None and not self._drain.is_over
        if self._num_signals > (2 if is_draining else 1):
            for child in self._children:
                child.kill()

    def _on_hangup(self, *_: object) -> None:
        self._keys_are_due = True
        self._wake.set()

    # -- start ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._stopping:
            return
        try:
            self._weights.write_launch()
        except OSError as error:
            raise ConfigError(f"run_dir: {error}") from None
        self._records.event("start", pid=os.getpid(), port=self.names.port)
        if self._nodes is not None and not self._await_nodes():
            return
        for place in places(self.config):
            self._start_child(place)
        self._send_node_orders()
        self._set_state("loading")
        while not self._stopping and not all(child.is_ready for child in self._children):
            self._turn()

    def _await_nodes(self) -> bool:
        """Wait for the other nodes. Returns True if all have joined. Nothing is loaded before."""
        nodes = self._nodes
        assert nodes is not None
        self._set_state("loading")
        logger.info("waiting for %s at %s", ", ".join(nodes.missing), self.config.dist_addr)
        deadline = time.monotonic() + self.config.start_timeout
        while nodes.missing and not self._stopping:
            self._turn()
            if nodes.refusal:
                self._fail(ProcessFailed("nodes", nodes.refusal, EXIT_CONFIG))
            elif time.monotonic() > deadline:
                self._fail_for_nodes()
        if not self._stopping:
            self._write_node_addresses()
        return not self._stopping

    def _fail_for_nodes(self) -> None:
        nodes = self._nodes
        assert nodes is not None
        missing = f"{', '.join(nodes.missing)}: not there within {self.config.start_timeout:g} s"
        if nodes.stranger:
            missing += f"; {nodes.stranger}"
        self._fail(ProcessFailed("nodes", missing, EXIT_INTERNAL))

    def _write_node_addresses(self) -> None:
        """Write the nodes' addresses for the scheduler, before it is started. Raises OSError."""
        assert self._nodes is not None
        addresses = [self.config.node_addr, *(host.address for host in self._nodes.hosts.values())]
        write_atomically(self.names.endpoints.nodes_file, "\n".join(addresses).encode())

    def _start_child(self, place: ProcessPlace) -> None:
        self._last_words.pop(place.name, None)
        child = self._children.start(place, self._epoch)
        self._records.event("spawn", process=place.name, pid=child.pid, epoch=self._epoch)

    def _announce(self) -> None:
        self._set_state("ready")
        config, names = self.config, self.names
        where = config.http_url(names.port) if names.http else f"run directory {names.run_dir.path}"
        over_tcp = f" and {config.zmq_bind}" if config.zmq_bind else ""
        ready = f"ready: {config.model_names[0]} on {where}{over_tcp}"
        if names.http and not logger.isEnabledFor(logging.INFO):
            write_line(ready)  # with port 0, only this line says which port it is
        else:
            logger.info(ready)

    # -- serve ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serve until the ring fails, or a signal has come and the requests of that moment have finished."""
        while not self._stopping:
            self._turn()
        if self._failure is not None:
            return
        self._drain = Drain(self._page, self.config.drain_timeout)
        self._set_state("draining")
        while self._failure is None and not self._drain.look(self._ends_at_once):
            self._turn()

    def _turn(self) -> None:
        fired = [source for source, _ in self._poller.poll(int(POLL_S * 1000))]
        self._wake.take()
        if self._nodes is not None:
            self._nodes.turn()
        self._read_messages()
        self._deaths.look()
        for child in self._children.exited(fired):
            # A child that died together with another one of its unit has been reaped with it.
            if self._children.get(child.place) is child:
                self._on_exit(child)
        for child, reason, is_stopped in self._watchdog.look(self._children):
            logger.warning("%s hangs: %s; it is killed", child.place.name, reason)
            self._records.event("hang", process=child.place.name, pid=child.pid, reason=reason)
            self._last_words[child.place.name] = ProcessFailed(child.place.name, reason, EXIT_INTERNAL)
            if not is_stopped:
                self._deaths.note_hang(child)
            child.kill()
        self._start_due()
        self._turn_weights()
        if self._keys_are_due and self.names.tenants.try_read():
            self._keys_are_due = False
        self._beat()
        if self._parent.has_ended():
            self._num_signals += 2  # the process that asks is gone, so no request needs to finish

    def _read_messages(self) -> None:
        for message in [*self.names.inbox.drain(), *(self._nodes.take_news() if self._nodes else ())]:
            if isinstance(message, ProcessReady):
                self._on_ready(message)
            elif isinstance(message, ControlRequest):
                if message.op == "update_weights":
                    self._weights.receive(message, may_begin=self._may_update)
            elif message.role in self._names_of_processes:
                self._last_words[message.role] = message
                if not self._may_restart:
                    self._fail(message)

    def _on_ready(self, message: ProcessReady) -> None:
        """Record that a child is ready. Ignored for a child that is not being started."""
        for child in self._children:
            if (child.place.name, child.epoch) == (message.role, message.epoch) and not child.is_ready:
                child.is_ready = True
                took_s = round(time.monotonic() - child.started_at, 3)
                self._records.event(
                    "ready", process=child.place.name, pid=child.pid, epoch=child.epoch, seconds=took_s
                )
                self.info.update(message.info)
                self._write_state()
        if self._is_engine_ready:
            self._weights.engine_ready()

    @property
    def _is_engine_ready(self) -> bool:
        """Return True if every process of the engine is ready."""
        engine = [place for place in places(self.config) if place.unit == ENGINE]
        return all((child := self._children.get(place)) and child.is_ready for place in engine)

    @property
    def _epoch_of_engine(self) -> int:
        return max((child.epoch for child in self._children if child.place.unit == ENGINE), default=0)

    @property
    def _may_update(self) -> bool:
        return self._state == "ready" and not self._stopping

    def _turn_weights(self) -> None:
        is_whole = not self._due and all(child.is_ready for child in self._children)
        self._weights.turn(self._epoch_of_engine, is_whole=is_whole, may_begin=self._may_update)
        if self._weights.is_overdue:
            for child in self._children:
                if child.place.unit == ENGINE:
                    child.kill()

    # -- deaths and restarts ---------------------------------------------------------------------------------

    @property
    def _may_restart(self) -> bool:
        """Return False while starting, since a process that cannot start will not the second time either, and
        while everything is being ended.
        """
        serves = self._state in ("ready", "draining") and not self._ends_at_once
        return self.config.restart == "auto" and serves

    def _on_exit(self, child: Child) -> None:
        """Handle the end of a child that was not asked to end. It is a fault, whatever its exit code."""
        code = self._reap(child)
        if code > 0 and child.place.name not in self._last_words:
            self.names.inbox.socket.poll(LAST_WORDS_MS)
        self._read_messages()
        name = child.place.name
        failure = self._last_words.pop(name, None) or ProcessFailed(
            name, f"the process {describe_exit(code)}", EXIT_INTERNAL
        )
        if not self._may_restart:
            self._fail(failure)
        elif child.place.unit == ENGINE and self._weights.awaits_end:
            self._replace_engine(child, failure)
        else:
            self._restart(child, code, failure)

    def _replace_engine(self, child: Child, failure: ProcessFailed) -> None:
        """Start an engine with other weights in the place of one that has ended for them. It does not count
        as a restart.
        """
        others = [other for other in self._children if other.place.unit == ENGINE]
        deadline = time.monotonic() + self._weights.grace_s
        for other in others:
            while not other.has_ended(POLL_S) and time.monotonic() < deadline:
                self._beat()
        self._end(others)
        if all(each.is_ready for each in (child, *others)):
            self._deaths.note_end(child.place)
        reason = self._weights.engine_ended(f"{failure.role}: {failure.message}")
        logger.info("the engine is replaced: %s", reason)
        self._start_again(ENGINE, reason, time.monotonic())

    def _reap(self, child: Child) -> int:
        """Reap a child and mark its slot of the status page as gone. The other fields keep their
        last values.
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
        if self._may_restart and slot.epoch == child.epoch:
            self._page.write(child.place.role, slot._replace(state="restarting"), child.place.index)
        return code

    def _was_ready(self, child: Child) -> bool:
        """Return True if a child was ready, by its message or by the status page. Clients send as soon as the
        page says so, and the message may arrive after the death.
        """
        slot = self._page.read(child.place.role, child.place.index)
        return child.is_ready or (slot.epoch == child.epoch and slot.state == "ready")

    def _restart(self, child: Child, code: int, failure: ProcessFailed) -> None:
        unit, limit = child.place.unit, self._max_restarts_of(child.place)
        seen_at = time.monotonic()
        others = [other for other in self._children if other.place.unit == unit]
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
            self._fail(ProcessFailed(failure.role, f"{failure.message}; {spent}", EXIT_INTERNAL))
            return
        epoch = self._epoch + 1
        logger.warning("%s: %s; restarting %s (epoch %d)", failure.role, failure.message, unit, epoch)
        self._start_again(unit, failure.message, seen_at, delay_s)

    def _end(self, unit: Sequence[Child]) -> None:
        for other in unit:
            other.kill()
        for other in unit:
            while not other.has_ended(POLL_S):
                self._beat()  # a large process may take longer to end than the heartbeat allows
            self._reap(other)

    def _start_again(self, unit: str, reason: str, seen_at: float, delay_s: float = 0.0) -> None:
        """Have the processes of a unit that has ended started under the next epoch."""
        self._epoch += 1
        self._records.event("restart", unit=unit, reason=reason, epoch=self._epoch, delay=round(delay_s, 3))
        self._due.update({place: seen_at + delay_s for place in places(self.config) if place.unit == unit})
        self._write_state()

    def _wait_for_node_news(self, others: Sequence[Child]) -> None:
        """Wait briefly for news of ranks on other nodes. A rank that was killed from outside also ends those
        of this node, whose ends are noticed sooner.
        """
        deadline = time.monotonic() + NODE_NEWS_S
        for other in others:
            while other.place.node and not other.has_ended(POLL_S) and time.monotonic() < deadline:
                self._beat()

    def _start_due(self) -> None:
        if self._ends_at_once:
            return
        now = time.monotonic()
        due = self._without_missing_nodes([place for place, at in self._due.items() if at <= now], now)
        for place in due:
            del self._due[place]
            try:
                self._start_child(place)
            except StartError as error:
                self._start_later(place, error)
        if due:
            self._send_node_orders()
            self._write_state()

    def _start_later(self, place: ProcessPlace, error: StartError) -> None:
        """Try again to start a process for which the system had no resources. Each try counts as a
        restart.
        """
        limit = self._max_restarts_of(place)
        try:
            delay_s = self._deaths.spend_restart(place, limit, by_itself=True, was_ready=False)
        except StartError:
            self._fail(ProcessFailed(place.name, str(error), EXIT_INTERNAL))
        else:
            logger.warning("%s; tried again in %g s", error, delay_s)
            self._due[place] = time.monotonic() + delay_s

    def _max_restarts_of(self, place: ProcessPlace) -> int:
        return self.config.max_engine_restarts if place.unit == ENGINE else self.config.max_restarts

    def _send_node_orders(self) -> None:
        """Send agents their orders now instead of after the next poll."""
        if self._nodes is not None:
            self._nodes.turn()

    def _without_missing_nodes(self, due: list[ProcessPlace], now: float) -> list[ProcessPlace]:
        """Leave out the engine while one of its nodes is missing. If the node does not return, the launch
        ends.
        """
        engine = [place for place in due if place.unit == ENGINE]
        if self._nodes is None or not engine:
            return due
        if not self._nodes.missing:
            self._write_node_addresses()
            return due
        if now - self._due[engine[0]] > self.config.start_timeout:
            self._fail_for_nodes()
        return [place for place in due if place.unit != ENGINE]

    def _fail(self, failure: ProcessFailed) -> None:
        """Let the ring fail. Only the first failure is reported. Processes that were told to end at once (by
        any signal while starting, later by the second one) have not failed.
        """
        if self._failure is None and not self._ends_at_once:
            self._failure = failure

    # -- what others see -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        if self._epoch > FIRST_EPOCH and (self._due or not all(child.is_ready for child in self._children)):
            self._recovery_ns = time.monotonic_ns()
        status = ProcessStatus(
            self._epoch,
            os.getpid(),
            self._state,
            time.monotonic_ns(),
            recovery_ns=self._recovery_ns,
        )
        self._page.write("launcher", status)

    def _set_state(self, state: str) -> None:
        self._state = state
        self._records.event("state", state=state, reason=self._failure.message if self._failure else None)
        # HTTP servers answer by the slot of the status page, so it is written before the file: a client that
        # reads a state in the file is then answered accordingly. A failure is the exception: a client that
        # sees it in the slot must find the reason in the file. Likewise nobody is told that the ring is ready
        # before the file says so.
        if state != "failed":
            self._beat()
        self._write_state()
        if state in ("ready", "failed"):
            self._records.wait_written()
        self._beat()

    def _write_state(self) -> None:
        config, failure = self.config, self._failure
        state = LaunchState(
            launch_id=self.names.run_dir.path.name,
            state=self._state,
            epoch=self._epoch,
            pid=os.getpid(),
            guardian_pid=self.names.guardian.pid,
            host=config.host,
            port=self.names.port,
            zmq_bind=config.zmq_bind,
            model=config.model_names[0],
            children=[
                *(
                    ChildState(
                        child.place.role,
                        child.place.index,
                        child.pid,
                        child.epoch,
                        child.is_ready,
                        child.place.node,
                    )
                    for child in self._children
                ),
                *(
                    ChildState(place.role, place.index, 0, self._epoch, False, place.node)
                    for place in self._due
                ),
            ],
            restarts=self._deaths.restarts,
            info=self.info,
            error=f"{failure.role}: {failure.message}" if failure else "",
            exit_code=failure.exit_code if failure else EXIT_OK,
        )
        self._records.state(state)

    # -- stop ------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End all children, the HTTP server first so that its callers get their answers; then remove every
        name.
        """
        self.names.stop_listening()
        if self._failure is None and self._state != "draining":
            self._set_state("draining")
        self._children.end([child for child in self._children if child.place.role == "api"], API_EXIT_S)
        if self._nodes is not None:
            failure = self._failure
            reason = f"{failure.role}: {failure.message}" if failure else ""
            self._nodes.stop(reason, failure.exit_code if failure else EXIT_OK)
        self._children.end(self._children, CHILD_EXIT_S)
        self._set_state("failed" if self._failure else "absent")
        self.names.close()
