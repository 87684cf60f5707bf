"""Launch under test: `python launch.py` as a user starts it, or a fork that does the same
(tests/harness/warm_start.py), with checks of everything that it might leave behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.harness.warm_start import WarmProcess, try_warm_start

ROOT = Path(__file__).resolve().parents[3]
SLACK = 5.0
"""Factor by which anything may take longer than on a quiet machine: this one may be slow and have other work.
"""
START_S = 30.0
STOP_S = 10.0
PORTS, NUM_PORTS_OF_ONE = range(20000, 32000), 1000
IN_NETWORK = ("ip", "netns", "exec")


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `condition` held. `timeout_s`: what it may take on a quiet machine.

    Raises: TimeoutError naming `what` after SLACK times as long.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > SLACK * timeout_s:
            raise TimeoutError(f"{what}: not within {SLACK * timeout_s:g} s")
        time.sleep(0.01)
    return time.monotonic() - began


@cache
def _ports_to_look_at() -> range:
    """Ports that no other test process looks at: a name that only one of this machine can have keeps them
    from it until this one ends. All ports where there are more test processes than shares.
    """
    for number in range(len(PORTS) // NUM_PORTS_OF_ONE):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0carousel-tests-ports-{number}")
        except OSError:
            claim.close()
        else:
            claim.detach()
            return PORTS[number * NUM_PORTS_OF_ONE :][:NUM_PORTS_OF_ONE]
    return PORTS


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of so many ports in a row that nobody listens on, below those that the system hands out."""
    ports = _ports_to_look_at()
    # At random: a port that has just been used stays taken for a while.
    for first in random.sample(ports[: len(ports) - count], 100):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    listener = stack.enter_context(socket.socket())
                    listener.bind((host, port))
            except OSError:
                continue
            return first
    raise OSError(f"no {count} free ports in a row")


class Launched:
    """One launch with its own run directory and a free port."""

    def __init__(
        self, *arguments: str, module: str = "launch", prefix: tuple[str, ...] = (), is_cold: bool = False
    ) -> None:
        """`prefix`: a command that runs the launch as itself, such as `ip netns exec NAME`. `is_cold`: True
        starts it as a user does, whatever that costs.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="launched-")
        self.run_dir = Path(self._folder.name) / "run"
        if "--run-dir" in arguments:
            self.run_dir = Path(arguments[arguments.index("--run-dir") + 1])
        self._log_path = Path(self._folder.name) / "log"
        self._log = self._log_path.open("w+b")
        arguments = ("--port", "0", "--run-dir", str(self.run_dir), *arguments)
        *command, network = prefix or ("",)
        is_cold |= tuple(command) not in ((), IN_NETWORK)
        warm = None if is_cold else try_warm_start(module, arguments, self._log.fileno(), network)
        self.process: WarmProcess | subprocess.Popen[bytes] = warm or subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )

    def state(self) -> dict[str, Any]:
        """state.json, or {} while there is none."""
        try:
            state: dict[str, Any] = json.loads((self.run_dir / "state.json").read_bytes())
        except FileNotFoundError:
            return {}
        return state

    def wait_ready(self) -> Launched:
        def ready_or_ended() -> bool:
            state = self.state()
            # A killed launch may have left its state in the same directory.
            is_ready = state.get("pid") == self.process.pid and state["state"] == "ready"
            return is_ready or self.process.poll() is not None

        try:
            wait_until(ready_or_ended, START_S, "the launch gets ready")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; its log:\n{self.log()}") from None
        assert self.process.poll() is None, self.log()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.state()['port']}"

    def pid_of(self, role: str, index: int = 0) -> int:
        children = self.state()["children"]
        pids: dict[tuple[str, int], int] = {
            (child["role"], child["index"]): child["pid"] for child in children
        }
        return pids[role, index]

    def pids(self) -> list[int]:
        return [self.process.pid, *(child["pid"] for child in self.state().get("children", []))]

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def wait_exit(self, timeout_s: float) -> int:
        """Its exit code. `timeout_s`: as for `wait_until`. Raises TimeoutError with its log."""
        try:
            return self.process.wait(SLACK * timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{error}; its log:\n{self.log()}") from None

    def stop(self) -> int:
        """Ctrl-C, as the launcher sees it."""
        self.process.send_signal(signal.SIGINT)
        return self.wait_exit(STOP_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            if self.state().get("state") == "ready":
                wait_until(self._has_seen_a_signal, STOP_S, "the launch sees the signal")
                self.process.terminate()  # a second one: no request is waited for
            try:
                self.wait_exit(STOP_S)
            except TimeoutError:
                self.process.kill()
                self.process.wait()
        self._log.close()
        self._folder.cleanup()

    def _has_seen_a_signal(self) -> bool:
        return self.process.poll() is not None or self.state().get("state") != "ready"


@contextmanager
def launched(*arguments: str, module: str = "launch", is_cold: bool = False) -> Iterator[Launched]:
    """A launch that is ready; ended and cleaned up with the block. `module`: what is run as launch.py.
    `is_cold`: as for Launched.
    """
    launch = Launched(*arguments, module=module, is_cold=is_cold)
    try:
        yield launch.wait_ready()
    finally:
        launch.close()


def is_alive(pid: int) -> bool:
    """A zombie is gone: only its parent has not looked yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def leftovers(run_dir: Path) -> set[str]:
    """Names that a launch in `run_dir` may leave: its directory, shared memory, unix sockets."""
    found = {str(run_dir)} if run_dir.exists() else set()
    found |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "carousel" in name}
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return found | {line.split()[-1] for line in sockets if str(run_dir) in line}
