"""Supervisor: starts the processes of a ring, watches them, and leaves nothing behind.

A child that dies before it is ready ends the launch with its last error; one that dies later ends the ring
with errors to all callers. Children are told apart by pidfds, so a death is seen by the kernel's word and at
once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from runtime.config import RuntimeConfig, child_environment
from runtime.console import write_line
from runtime.errors import EXIT_INTERNAL, EXIT_OK, AddressInUse, ConfigError, StartError
from runtime.keys import ServerKeys
from runtime.messages import ProcessFailed, ProcessReady
from runtime.process import LaunchFile, process_name
from runtime.run_dir import RunDir
from runtime.status_page import Status, StatusPage
from runtime.transport import ZmqInbox

logger = logging.getLogger(__name__)

POLL_S = 0.1
# In which callers of a ring that failed learn it from the status page before its sockets go.
FAILURE_NOTICE_S = 0.3
LAST_WORDS_MS = 100
API_EXIT_S = 1.0
CHILD_EXIT_S = 0.3
LISTEN_BACKLOG = 2048
FIRST_EPOCH = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True, eq=False)
class Child:
    role: str
    index: int
    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    ready: bool = False


class Supervisor:
    def __init__(self, config: RuntimeConfig) -> None:
        """Take the signals, the run directory and the HTTP port. Raises
        AddressInUse or ConfigError; nothing is left behind then.
        """
        if config.curve_dir:
            ServerKeys.read(Path(config.curve_dir))  # the processes read them too; here nothing runs yet
        self.config = config
        self.children: list[Child] = []
        self.info: dict[str, int | float | str] = {}
        """What the processes said when they got ready, such as num_pages."""
        self._failure: ProcessFailed | None = None
        self._num_signals = 0
        self._state = "loading"
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
            signal.signal(signal.SIGHUP, self._on_signal)
        with ExitStack() as held:
            self.run_dir = RunDir(config.run_dir)
            held.callback(self.run_dir.remove)
            self._endpoints = self.run_dir.endpoints
            self._http = None if config.no_http else held.enter_context(_listen(config.host, config.port))
            self.port = self._http.getsockname()[1] if self._http else 0
            context = zmq.Context()
            held.callback(context.destroy, linger=0)
            try:
                self._status = StatusPage(
                    self._endpoints.status_file, create=True, counts=config.num_processes
                )
                held.callback(self._status.close)
                self._inbox = ZmqInbox(context, self._endpoints.launcher_in, "launcher_in", FIRST_EPOCH)
            except (OSError, zmq.ZMQError) as error:
                raise ConfigError(f"run_dir: {error}") from None
            self._held = held.pop_all()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)

    def run(self) -> int:
        """Start, serve until a signal or a death, stop. Returns the exit code.

        Raises: ConfigError when the run directory cannot be written, StartError when there is no process to
        be had.
        """
        try:
            if not self._stopping:
                self._start()
            if not self._stopping:
                self._announce()
            while not self._stopping:
                self._turn()
            if self._failure is not None:
                self._set_state("failed")
                time.sleep(FAILURE_NOTICE_S)
        finally:
            self._stop()
        if self._failure is None:
            return EXIT_OK
        write_line(f"error: {self._failure.role}: {self._failure.message}")
        return self._failure.exit_code

    @property
    def _stopping(self) -> bool:
        return self._failure is not None or self._num_signals > 0

    def _on_signal(self, *_: object) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            for child in self.children:
                child.process.kill()

    # -- start ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        launch = LaunchFile(self.config, FIRST_EPOCH)
        try:
            _write_atomically(self._endpoints.config_file, msgspec.json.format(msgspec.json.encode(launch)))
        except OSError as error:
            raise ConfigError(f"run_dir: {error}") from None
        if self.config.device == "cpu":
            self._spawn("worker", "model_worker.main")
        self._spawn("scheduler", "scheduler_proc.main")
        for index in range(self.config.detokenizer_workers):
            self._spawn("detokenizer", "detokenizer_proc.main", index)
        for index in range(self.config.tokenizer_workers):
            self._spawn("tokenizer", "tokenizer_proc.main", index)
        if self._http is not None:
            for index in range(self.config.api_workers):
                self._spawn("api", "api_server.main", index, http=self._http)
        self._set_state("loading")
        deadline = time.monotonic() + self.config.start_timeout
        while not self._stopping and not all(child.ready for child in self.children):
            if time.monotonic() > deadline:
                late = ", ".join(child.name for child in self.children if not child.ready)
                self._failure = ProcessFailed(
                    "launcher", f"not ready within {self.config.start_timeout:g} s: {late}", EXIT_INTERNAL
                )
            self._turn()

    def _spawn(self, role: str, module: str, index: int = 0, http: socket.socket | None = None) -> None:
        name = process_name(role, index, self.config)
        fds = () if http is None else (http.fileno(),)
        arguments = [str(os.getpid()), module, str(self.run_dir.path), str(index), *map(str, fds)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "runtime.child", *arguments],
                stdin=subprocess.DEVNULL,
                # A Ctrl-C in the terminal reaches the launcher alone, which then decides.
                start_new_session=True,
                pass_fds=fds,
                env=child_environment(),
            )
        except OSError as error:
            raise StartError(f"{name} cannot be started: {error}") from None
        child = Child(role, index, name, process, os.pidfd_open(process.pid))
        self._poller.register(child.pidfd, zmq.POLLIN)
        self.children.append(child)

    def _announce(self) -> None:
        self._set_state("ready")
        name = self.config.served_model_name
        where = (
            f"http://{self.config.host}:{self.port}" if self._http else f"run directory {self.run_dir.path}"
        )
        over_tcp = f" and {self.config.zmq_bind}" if self.config.zmq_bind else ""
        logger.info("ready: %s on %s%s", name, where, over_tcp)

    # -- one turn ------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        fired = {source for source, _ in self._poller.poll(int(POLL_S * 1000))}
        self._read_messages()
        for child in list(self.children):
            if child.pidfd in fired:
                self._on_exit(child)
        self._beat()
        if self.config.parent_pid and not Path(f"/proc/{self.config.parent_pid}").exists():
            self._num_signals += 1

    def _read_messages(self) -> None:
        for message in self._inbox.drain():
            if isinstance(message, ProcessReady):
                self._on_ready(message)
            elif self._failure is None:
                self._failure = message

    def _on_ready(self, message: ProcessReady) -> None:
        for child in self.children:
            if child.process.pid == message.pid:
                child.ready = True
        self.info.update(message.info)
        self._write_state()

    def _on_exit(self, child: Child) -> None:
        """A child that nobody asked to end has ended: whatever its code, that is a fault."""
        code = child.process.wait()
        self._poller.unregister(child.pidfd)
        os.close(child.pidfd)
        self.children.remove(child)
        if code > 0:
            # What it said last may take longer than the news of its end.
            self._inbox.socket.poll(LAST_WORDS_MS)
        self._read_messages()
        if self._failure is None and self._num_signals == 0:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            self._failure = ProcessFailed(child.name, f"the process {how}", EXIT_INTERNAL)

    def _beat(self) -> None:
        self._status.write("launcher", Status(FIRST_EPOCH, os.getpid(), self._state, time.monotonic_ns()))

    def _set_state(self, state: str) -> None:
        self._state = state
        self._write_state()
        # After the file: who sees in the slot that the ring has failed finds the reason there.
        self._beat()

    def _write_state(self) -> None:
        state = {
            "launch_id": self.run_dir.path.name,
            "state": self._state,
            "epoch": FIRST_EPOCH,
            "pid": os.getpid(),
            "host": self.config.host,
            "port": self.port,
            "zmq_bind": self.config.zmq_bind,
            "model": self.config.served_model_name,
            "children": [
                {
                    "role": child.role,
                    "index": child.index,
                    "pid": child.process.pid,
                    "ready": child.ready,
                }
                for child in self.children
            ],
            "info": self.info,
            "error": f"{self._failure.role}: {self._failure.message}" if self._failure else "",
            "exit_code": self._failure.exit_code if self._failure else EXIT_OK,
        }
        try:
            _write_atomically(self._endpoints.state_file, msgspec.json.format(msgspec.json.encode(state)))
        except OSError as error:
            # Whoever reads it may miss something; whoever is served need not.
            logger.warning("state.json is not up to date: %s", error)

    # -- stop ----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End all children, the HTTP server first so that its
        callers get their answers, then remove every name.
        """
        if self._http is not None:
            self._http.close()  # no caller is taken in any more
        if self._failure is None:
            self._set_state("draining")
        api = [child for child in self.children if child.role == "api"]
        _end(api, API_EXIT_S)
        _end([child for child in self.children if child.role != "api"], CHILD_EXIT_S)
        for child in self.children:
            os.close(child.pidfd)
        self._set_state("failed" if self._failure else "absent")
        self._held.close()


def _end(children: list[Child], grace_s: float) -> None:
    for child in children:
        child.process.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _listen(host: str, port: int) -> socket.socket:
    """Bind and listen before anything is loaded, so that a taken port is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressInUse(
            f"port: cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from None
    return listener


def _write_atomically(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)
