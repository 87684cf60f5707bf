"""Children: the processes of a launch: which there are, starting them, seeing them end, ending them.

They are told apart by pidfds, so a death is seen by the kernel's word and at once, and no signal can reach a
process that has got an old number.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from runtime.base.environment import child_environment
from runtime.base.errors import StartError
from runtime.ring.process import process_name
from runtime.settings.config import RuntimeConfig

ENGINE_ROLES = ("worker", "scheduler")
"""Roles that hold the state of one engine: when one of them dies, all are started again."""
ENGINE = "engine"
MODULES = {
    "worker": "model_worker.main",
    "scheduler": "scheduler_proc.main",
    "grammar": "grammar_proc.main",
    "detokenizer": "detokenizer_proc.main",
    "tokenizer": "tokenizer_proc.main",
    "api": "carousel.server",
}
ENGINE_OOM_SCORE = 300
OTHERS_OOM_SCORE = 100
"""Added to the oom_score_adj that the launcher has, in thousandths of the memory: when that is short the
kernel kills the engine first, which has most of it and whose requests are made again; the launcher, which
would take all others along, last.
"""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """A process that a launch has, whichever runs as it at the moment."""

    role: str
    index: int
    name: str
    """For logs and errors."""

    @property
    def unit(self) -> str:
        """Name of what is restarted as one."""
        return ENGINE if self.role in ENGINE_ROLES else self.name


@dataclass(slots=True, eq=False)
class Child:
    """A process that runs as one of the places."""

    place: ProcessPlace
    epoch: int
    process: subprocess.Popen[bytes]
    pidfd: int
    started_at: float = field(default_factory=time.monotonic)
    is_ready: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid


def places(config: RuntimeConfig) -> list[ProcessPlace]:
    """The processes of a launch with resolved settings, in the order in which they are started."""
    indices = {
        # On CUDA rank 0 of the model is in the scheduler's process.
        "worker": range(0 if config.device == "cpu" else 1, config.num_ranks),
        "scheduler": range(1),
        "grammar": range(0 if config.grammar_backend == "none" else 1),
        "detokenizer": range(config.detokenizer_workers),
        "tokenizer": range(config.tokenizer_workers),
        "api": range(0 if config.no_http else config.api_workers),
    }
    return [
        ProcessPlace(role, index, process_name(role, index, config))
        for role, numbers in indices.items()
        for index in numbers
    ]


class Children:
    def __init__(self, run_dir: Path, poller: zmq.Poller, http: socket.socket | None) -> None:
        """`http`: the listening socket that API servers inherit. `poller` gets the pidfds."""
        self._run_dir = run_dir
        self._poller = poller
        self._http = http
        self._running: dict[ProcessPlace, Child] = {}

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._running.values()))

    def get(self, place: ProcessPlace) -> Child | None:
        return self._running.get(place)

    def start(self, place: ProcessPlace, epoch: int) -> Child:
        """Raises StartError when there is no process to be had."""
        fds = (self._http.fileno(),) if place.role == "api" and self._http is not None else ()
        numbers = map(str, (place.index, epoch, *fds))
        oom_score = ENGINE_OOM_SCORE if place.unit == ENGINE else OTHERS_OOM_SCORE
        arguments = [str(os.getpid()), str(oom_score), MODULES[place.role], str(self._run_dir), *numbers]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.launcher.child", *arguments],
                stdin=subprocess.DEVNULL,
                # A Ctrl-C in the terminal reaches the launcher alone, which then decides.
                start_new_session=True,
                pass_fds=fds,
                env=child_environment(),
            )
        except OSError as error:
            raise StartError(f"{place.name} cannot be started: {error}") from None
        child = Child(place, epoch, process, os.pidfd_open(process.pid))
        self._poller.register(child.pidfd, zmq.POLLIN)
        self._running[place] = child
        return child

    def kill(self, child: Child) -> None:
        """Its end is then seen like any other."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def has_ended(self, child: Child, timeout_s: float) -> bool:
        """Wait so long for the end of a child."""
        poll = select.poll()
        poll.register(child.pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def reap(self, child: Child) -> int:
        """Wait for the end of a child that has ended or has been killed. Exit code or minus the signal."""
        code = child.process.wait()
        self._poller.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._running[child.place]
        return code

    def exited(self, fired: Iterable[Any]) -> list[Child]:
        """The children among what a poll has returned."""
        sources = set(fired)
        return [child for child in self if child.pidfd in sources]

    def end(self, children: Iterable[Child], grace_s: float) -> None:
        """Ask them to end, kill those that have not within `grace_s`, wait for all."""
        ending = list(children)
        for child in ending:
            child.process.terminate()
        deadline = time.monotonic() + grace_s
        for child in ending:
            if not self.has_ended(child, max(0.0, deadline - time.monotonic())):
                self.kill(child)
            self.reap(child)


def describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
