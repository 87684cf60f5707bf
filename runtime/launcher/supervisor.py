"""Supervisor: starts the processes of a ring, watches them until the launch is to end, and ends them all.

A child that dies before all have been ready ends the launch with its error. One that dies later is replaced
(Restarts). With `--restart never`, or after too many restarts, the ring ends and all callers get errors.
"""

from __future__ import annotations

import logging
import os
import time

import zmq

from runtime.base.console import write_error, write_line
from runtime.base.errors import EXIT_CONFIG, EXIT_DRAIN_CUT, EXIT_INTERNAL, EXIT_OK, ConfigError
from runtime.launcher.children import CHILD_EXIT_S, LAST_WORDS_MS, Children
from runtime.launcher.deaths.death_causes import Deaths
from runtime.launcher.deaths.restarts import Restarts
from runtime.launcher.drain import Drain
from runtime.launcher.hosts.host import ENGINE, Child, places
from runtime.launcher.hosts.local import LocalHost, WatchedProcess
from runtime.launcher.launch_names import LaunchNames
from runtime.launcher.launch_signals import LaunchSignals
from runtime.launcher.launch_status import LaunchStatus
from runtime.launcher.watchdog import Watchdog
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import ControlRequest, ProcessFailed, ProcessReady

logger = logging.getLogger(__name__)

POLL_S = 0.1
FAILURE_NOTICE_S = 0.3
"""Seconds for which a failed ring keeps its sockets, so that callers can read the reason on the status page.
"""
API_EXIT_S = 1.0
"""Seconds that HTTP servers have to finish their answers at the end of a launch."""


class Supervisor:
    def __init__(self, config: RuntimeConfig) -> None:
        """Set up signals, the run directory and the HTTP port. Raises AddressInUse, ConfigError or
        StartError, with nothing left behind.
        """
        self.config = config
        self._drain: Drain | None = None
        self._names_of_processes = frozenset(place.name for place in places(config))
        self._parent = WatchedProcess(config.parent_pid, "parent_pid")
        self._children = Children({})  # a second signal may come before there are any, and asks for them
        self._signals = LaunchSignals(self._on_stop_signal, has_key_files=config.has_key_files)
        self.names = LaunchNames(config)
        self._page, self._records = self.names.page, self.names.records
        self._poller = zmq.Poller()
        self._poller.register(self.names.inbox.socket, zmq.POLLIN)
        self._poller.register(self._signals.wake.fd, zmq.POLLIN)
        nodes = self._nodes = self.names.nodes
        if nodes is not None:
            self._poller.register(nodes.socket, zmq.POLLIN)
        listeners = {"api": self.names.http, "worker": nodes.meeting if nodes else None}
        local = LocalHost(self.names.run_dir.path, self._poller, listeners)
        children = self._children = Children({0: local, **(nodes.hosts if nodes else {})})
        self._deaths = Deaths(self.names.endpoints, self._page, config.restart_window)
        self._status = LaunchStatus(config, self.names, children, self._signals, self._deaths.restarts)
        self._restarts = Restarts(config, self.names, children, self._status, self._deaths)
        self._watchdog = Watchdog(self._page, config)
        self._weights = self.names.weights
        self._weights.wake = self._signals.wake.set

    def run(self) -> int:
        """Start all processes, serve until a signal or a death that cannot be repaired, and stop. Returns the
        exit code. Raises ConfigError when the run directory cannot be written, StartError when no process can
        be started.
        """
        status = self._status
        try:
            self._start()
            if not status.is_stopping:
                status.enter("ready")
                self._announce()
                self._serve()
            if status.failure is not None:
                status.enter("failed")
                time.sleep(FAILURE_NOTICE_S)
        finally:
            self._stop()
        if status.failure is not None:
            write_error(f"{status.failure.role}: {status.failure.message}")
            return status.failure.exit_code
        if self._drain is not None and self._drain.was_cut:
            write_error("stopped before all requests had finished")
            return EXIT_DRAIN_CUT
        return EXIT_OK

    def _on_stop_signal(self, num_signals: int) -> None:
        """Kill all processes if the signal is one too many for a drain or an end that takes its time."""
        is_draining = self._drain is not None and not self._drain.is_over
        if num_signals > (2 if is_draining else 1):
            for child in self._children:
                child.kill()

    # -- start ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        status = self._status
        if status.is_stopping:
            return
        try:
            self._weights.write_launch()
        except OSError as error:
            raise ConfigError(f"run_dir: {error}") from None
        self._records.event("start", pid=os.getpid(), port=self.names.port)
        if self._nodes is not None and not self._await_nodes():
            return
        for place in places(self.config):
            self._restarts.start(place)
        if self._nodes is not None:
            self._nodes.turn()  # agents get their orders now instead of after the next poll
        status.enter("loading")
        while not status.is_stopping and not self._children.are_complete:
            self._turn()

    def _await_nodes(self) -> bool:
        """Wait for the other nodes. Returns True if all have joined. Nothing is loaded before."""
        nodes, status = self._nodes, self._status
        assert nodes is not None
        status.enter("loading")
        logger.info("waiting for %s at %s", ", ".join(nodes.missing), self.config.dist_addr)
        deadline = time.monotonic() + self.config.start_timeout
        while nodes.missing and not status.is_stopping:
            self._turn()
            if nodes.refusal:
                status.fail(ProcessFailed("nodes", nodes.refusal, EXIT_CONFIG))
            elif time.monotonic() > deadline:
                status.fail(ProcessFailed("nodes", nodes.absence, EXIT_INTERNAL))
        if not status.is_stopping:
            nodes.write_addresses(self.names.endpoints.nodes_file)
        return not status.is_stopping

    def _announce(self) -> None:
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
        status = self._status
        while not status.is_stopping:
            self._turn()
        if status.failure is not None:
            return
        self._drain = Drain(self._page, self.config.drain_timeout)
        status.enter("draining")
        while status.failure is None and not self._drain.look(status.ends_at_once):
            self._turn()

    def _turn(self) -> None:
        fired = [source for source, _ in self._poller.poll(int(POLL_S * 1000))]
        self._signals.wake.take()
        if self._nodes is not None:
            self._nodes.turn()
        self._read_messages()
        self._deaths.look()
        for child in self._children.exited(fired):
            # A child that died together with another one of its unit has been reaped with it.
            if self._children.get(child.place) is child:
                self._on_exit(child)
        for child, reason, is_stopped in self._watchdog.look(self._children):
            self._restarts.kill_hung(child, reason, is_stopped=is_stopped)
        self._restarts.start_due()
        self._turn_weights()
        if self._signals.keys_are_due and self.names.tenants.try_read():
            self._signals.keys_are_due = False
        self._status.beat()
        if self._parent.has_ended():
            self._signals.num_stops += 2  # the process that asks is gone, so no request needs to finish

    def _read_messages(self) -> None:
        for message in [*self.names.inbox.drain(), *(self._nodes.take_news() if self._nodes else ())]:
            if isinstance(message, ProcessReady):
                self._on_ready(message)
            elif isinstance(message, ControlRequest):
                if message.op == "update_weights":
                    self._weights.receive(message, may_begin=self._may_update)
            elif message.role in self._names_of_processes:
                self._restarts.note_last_words(message)

    def _on_ready(self, message: ProcessReady) -> None:
        """Record that a child is ready. Ignored for a child that is not being started."""
        for child in self._children:
            if (child.place.name, child.epoch) == (message.role, message.epoch) and not child.is_ready:
                child.is_ready = True
                took_s = round(time.monotonic() - child.started_at, 3)
                self._records.event(
                    "ready", process=child.place.name, pid=child.pid, epoch=child.epoch, seconds=took_s
                )
                self._status.info.update(message.info)
                self._status.write()
        if self._is_engine_ready:
            self._weights.engine_ready()

    def _on_exit(self, child: Child) -> None:
        """Handle the end of a child that was not asked to end."""
        code = self._restarts.reap(child)
        if code > 0 and not self._restarts.has_last_words(child):
            self.names.inbox.socket.poll(LAST_WORDS_MS)
        self._read_messages()
        self._restarts.replace(child, code)

    # -- other weights ---------------------------------------------------------------------------------------

    @property
    def _is_engine_ready(self) -> bool:
        """True if every process of the engine is ready."""
        engine = [place for place in places(self.config) if place.unit == ENGINE]
        return all((child := self._children.get(place)) and child.is_ready for place in engine)

    @property
    def _may_update(self) -> bool:
        return self._status.state == "ready" and not self._status.is_stopping

    def _turn_weights(self) -> None:
        engine = self._children.of_unit(ENGINE)
        epoch = max((child.epoch for child in engine), default=0)
        self._weights.turn(epoch, is_whole=self._children.are_complete, may_begin=self._may_update)
        if self._weights.is_overdue:
            for child in engine:
                child.kill()

    # -- stop ------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End all children, the HTTP server first so that its callers get their answers; then remove every
        name.
        """
        self.names.stop_listening()
        failure = self._status.failure
        if failure is None and self._status.state != "draining":
            self._status.enter("draining")
        self._children.end([child for child in self._children if child.place.role == "api"], API_EXIT_S)
        if self._nodes is not None:
            reason = f"{failure.role}: {failure.message}" if failure else ""
            self._nodes.stop(reason, failure.exit_code if failure else EXIT_OK)
        self._children.end(self._children, CHILD_EXIT_S)
        self._status.enter("failed" if failure else "absent")
        self.names.close()
