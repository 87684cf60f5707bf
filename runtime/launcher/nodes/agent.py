"""Agent: the launcher of a node other than node 0. It starts and ends ranks as node 0 orders, and reports how
they are. It decides nothing: node 0 replaces what dies.

If the connection to node 0 is lost, the agent ends all its ranks, because node 0 has given up this node or is
about to.
"""

from __future__ import annotations

import logging
import os
import signal
import time

import msgspec
import zmq

from runtime.base.console import write_error
from runtime.base.errors import EXIT_OK, ConfigError, StartError
from runtime.base.wake import Wake
from runtime.launcher.children import CHILD_EXIT_S, LAST_WORDS_MS, STOP_SIGNALS, Children
from runtime.launcher.hosts.host import Child, ProcessPlace, describe_exit, places
from runtime.launcher.hosts.local import LocalHost, WatchedProcess
from runtime.launcher.launch_names import LaunchNames
from runtime.launcher.nodes.agent_link import AgentLink
from runtime.ring.launch_state import ChildState, LaunchState, write_atomically
from runtime.ring.node_messages import (
    KillRank,
    NodeBeat,
    NodeLeft,
    RankBeat,
    RankEnded,
    Rejoin,
    StartRank,
    StopNode,
)
from runtime.ring.process import FIRST_EPOCH, LaunchFile
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import ProcessFailed, ProcessReady
from runtime.wire.status_page import STATES, ProcessStatus

logger = logging.getLogger(__name__)

BEAT_S = 0.1


class Agent:
    def __init__(self, config: RuntimeConfig) -> None:
        """Set up signals and the run directory. Raises AddressInUse, ConfigError, ModelError or StartError,
        with nothing left behind.
        """
        self._config = config
        self._num_signals = 0
        self._wake = Wake()
        self._state = "loading"
        self._epoch = FIRST_EPOCH
        self._beat_at = 0.0
        self._ending: StopNode | None = None
        self._parent = WatchedProcess(config.parent_pid, "parent_pid")
        self._link = AgentLink(config)
        self._children = Children({})  # a second signal may come before there are any, and asks for them
        for number in (*STOP_SIGNALS, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._places = {
            place.index: place
            for place in places(config)
            if place.role == "worker" and place.node == config.node_rank
        }
        self.names = LaunchNames(config)
        self._poller = zmq.Poller()
        self._poller.register(self.names.inbox.socket, zmq.POLLIN)
        self._poller.register(self._wake.fd, zmq.POLLIN)
        host = LocalHost(self.names.run_dir.path, self._poller, {})
        self._children = Children({config.node_rank: host})

    def run(self) -> int:
        """Serve node 0 until the launch is over, or a signal comes. Returns the exit code. Raises ConfigError
        if node 0 refuses this node or the run directory cannot be written, StartError if node 0 cannot be
        reached.
        """
        launch = msgspec.json.format(msgspec.json.encode(LaunchFile(self._config)))
        try:
            write_atomically(self.names.endpoints.config_file, launch)
        except OSError as error:
            raise ConfigError(f"run_dir: {error}") from None
        self.names.records.event("start", pid=os.getpid(), port=0)
        logger.info("node %d waits for node 0 at %s", self._config.node_rank, self._config.dist_addr)
        try:
            self._set_state("loading")
            while self._ending is None and not self._num_signals:
                self._turn()
        finally:
            self._children.end(self._children, CHILD_EXIT_S)
            self._link.send(NodeLeft("it was stopped" if self._ending is None else "the launch is over"))
            self._link.close()
            self._set_state("absent")
            self.names.close()
        if self._ending is None or not self._ending.reason:
            return self._ending.exit_code if self._ending else EXIT_OK
        write_error(f"node 0: {self._ending.reason}")
        return self._ending.exit_code

    def _on_signal(self, *_: object) -> None:
        self._num_signals += 1
        self._wake.set()
        if self._num_signals > 1:
            for child in self._children:
                child.kill()

    def _turn(self) -> None:
        # The socket is another one after a reconnection.
        self._poller.register(self._link.socket, zmq.POLLIN)
        fired = [source for source, _ in self._poller.poll(int(BEAT_S * 1000))]
        self._wake.take()
        self._poller.unregister(self._link.socket)
        self._forward()
        for child in self._children.exited(fired):
            self._on_exit(child)
        for order in self._link.turn():
            match order:
                case StartRank(index, epoch) if index in self._places:
                    self._start(self._places[index], epoch)
                case KillRank(index, epoch):
                    for child in self._children:
                        if (child.place.index, child.epoch) == (index, epoch):
                            child.kill()
                case Rejoin():
                    self._end_all("node 0 has lost this node")
                case StopNode():
                    self._ending = order
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._link.send(NodeBeat(tuple(map(self._beat_of, self._children))))
            self._show()
        if self._parent.has_ended():
            self._num_signals += 1

    def _forward(self) -> None:
        """Pass the ranks' messages on to node 0."""
        for message in self.names.inbox.drain():
            self._link.send(message)
            if isinstance(message, ProcessReady):
                for child in self._children:
                    if (child.place.name, child.epoch) == (message.role, message.epoch):
                        child.is_ready = True
                        self.names.records.event(
                            "ready", process=child.place.name, pid=child.pid, epoch=child.epoch
                        )
                self._set_state("ready" if all(child.is_ready for child in self._children) else "loading")

    def _on_exit(self, child: Child) -> None:
        code = self._children.reap(child)
        if code > 0:
            # The process's last message may arrive after the news of its end.
            self.names.inbox.socket.poll(LAST_WORDS_MS)
        self._forward()
        logger.warning("%s %s", child.place.name, describe_exit(code))
        self.names.records.event("exit", process=child.place.name, pid=child.pid, code=code)
        self._link.send(RankEnded(child.place.index, child.epoch, code))
        self._set_state("loading")

    def _start(self, place: ProcessPlace, epoch: int) -> None:
        """Start a rank. A rank of an earlier epoch in the same place is ended first."""
        earlier = self._children.get(place)
        if earlier is not None:
            if earlier.epoch >= epoch:
                return
            earlier.kill()
            self._on_exit(earlier)
        self._epoch = epoch
        try:
            child = self._children.start(place, epoch)
        except StartError as error:
            self._link.send(ProcessFailed(place.name, str(error), error.exit_code))
            self._link.send(RankEnded(place.index, epoch, error.exit_code))
            return
        self.names.records.event("spawn", process=place.name, pid=child.pid, epoch=epoch)
        self._set_state("loading")

    def _end_all(self, reason: str) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            self._children.reap(child)
        logger.warning("%s: its ranks are ended, and it joins anew", reason)
        self._set_state("loading")

    def _beat_of(self, child: Child) -> RankBeat:
        slot = self.names.page.read("worker", child.place.index)
        if slot.epoch != child.epoch:
            slot = ProcessStatus(child.epoch, child.pid, "loading")
        return RankBeat(
            child.place.index,
            child.epoch,
            child.pid,
            STATES.index(slot.state),
            slot.heartbeat_ns,
            slot.loaded,
            child.is_stopped,
        )

    # -- what can be read here -------------------------------------------------------------------------------

    def _show(self) -> None:
        status = ProcessStatus(self._epoch, os.getpid(), self._state, time.monotonic_ns())
        self.names.page.write("launcher", status)

    def _set_state(self, state: str) -> None:
        if state != self._state:
            self.names.records.event("state", state=state)
        self._state = state
        self._show()
        config = self._config
        children = [
            ChildState("worker", child.place.index, child.pid, child.epoch, child.is_ready, child.place.node)
            for child in self._children
        ]
        self.names.records.state(
            LaunchState(
                launch_id=self.names.run_dir.path.name,
                state=state,
                epoch=self._epoch,
                pid=os.getpid(),
                guardian_pid=self.names.guardian.pid,
                host=config.node_addr,
                port=0,
                zmq_bind="",
                model=config.model_names[0],
                children=children,
                restarts={},
                info={},
                error="",
                exit_code=EXIT_OK,
            )
        )
