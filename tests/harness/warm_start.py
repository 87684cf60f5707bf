"""Warm starts: launches under test that are forked from a process which has imported torch, transformers and
the product, and whose own processes are forked from them. A start costs a quarter of a user's four seconds of
CPU, most of which are imports.

A test process that has called `use_warm_starts()` starts that process, the stock, with its first launch
(`python -m tests.harness.warm_start`); pytest does so, except with `--cold`. A forked process finds the same
as `python -m MODULE ARGUMENT ...`: arguments, environment, descriptors, signals, process group. The stock has
no thread and has computed nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO, NoReturn

from runtime.base.environment import child_environment

ROOT = Path(__file__).resolve().parents[2]
MODULES = frozenset(
    {
        *("launch", "tests.harness.ring.sleeping_worker", "tests.harness.ring.scripted_worker"),
        "tests.harness.second_rank",
    },
)
"""Modules that can be started so. A pretended GPU has to be there before torch is imported."""
COLD_FLAGS = ("--cpu-isa",)
"""Flags that libraries are told of before they are loaded."""
READ_LATER = ("CAROUSEL_", "OTEL_", "TORCHINDUCTOR_", "TIKTOKEN_", "TRITON_DEFAULT_FP_FUSION")
"""Beginnings of names of variables that no library of a launch reads as it is loaded. Torch's compiler,
litellm and Triton's interpreter have one each set in who imports them, as tests do.
"""
IMPORTED = (
    *("carousel.server.main", "grammar_proc.vocabulary", "runtime.text.tokenizer"),
    *("runtime.text.chat_template", "runtime.text.no_tokenizer", "scheduler_proc.build_scheduler"),
    *("scheduler_proc.policy.fcfs", "scheduler_proc.policy.longest_prefix"),
    *("scheduler_proc.capacity.max_utilization", "model_worker.executors.process"),
    *("model_worker.attention.cpu_native", "model_worker.attention.torch_native", "model_worker.device.cpu"),
    *("model_worker.models.llama", "model_worker.runner.recording.forward_program"),
    *("model_worker.sampling.ops.torch_ops", "safetensors.torch", "setproctitle", "jinja2.ext"),
)
"""Modules that every launch imports, sooner or later."""
MAINS = (
    *("scheduler_proc.main", "model_worker.main", "tokenizer_proc.main", "detokenizer_proc.main"),
    *("grammar_proc.main", "grammar_proc.compile_child", "runtime.launcher.main"),
)
"""Modules that are run as the main one of a process: imported for what they import, and forgotten."""
CHILD_ENTRY = "runtime.launcher.child"
OWN_RUNTIME = "runtime.launcher.main"
"""Module that an LLM runs as a process of its own."""
CLONE_NEWNET = 0x40000000
MAX_REQUEST_BYTES = 1 << 17
GONE = -1


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait so many seconds for something to read; None: as long as it takes."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


class ForkedChild:
    """A process that this one has forked. Stands in for the `subprocess.Popen` of the same arguments."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = -1,
        stderr: int = -1,
        start_new_session: bool = False,
        network: str = "",
        process_group: int | None = None,
        pass_fds: Collection[int] = (),
        env: Mapping[str, str],
    ) -> None:
        """`command`: a Python that runs a module. `stdout`, `stderr`: descriptors; those of this process when
        not given.
        """
        at = command.index("-m") + 1
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            _be(command[at], command[at + 1 :], (stdin, stdout, stderr), pass_fds, env, network)
        if process_group is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.setpgid(self.pid, process_group)

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal; None while it runs."""
        if self.returncode is None:
            self._look(os.WNOHANG)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return as `poll`, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and timeout is not None:
            fd = os.pidfd_open(self.pid)
            has_ended = _is_readable(fd, timeout)
            os.close(fd)
            if not has_ended:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        if self.returncode is None:
            self._look(0)
        assert self.returncode is not None
        return self.returncode

    def _look(self, options: int) -> None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _be(
    module: str,
    arguments: Sequence[str],
    streams: tuple[int, int, int],
    pass_fds: Collection[int],
    environment: Mapping[str, str],
    network: str,
) -> NoReturn:
    """Be `python -m MODULE ARGUMENT ...`, and end. This process is a fork: no thread but this one is here."""
    code = 1
    try:
        if network:
            _enter_network(network)
        _take_descriptors(streams, pass_fds)
        _forget_signals()
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [module, *arguments]
        for main in (module, arguments[2] if module == CHILD_ENTRY else ""):
            if main in MAINS:
                sys.modules.pop(main, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def _take_descriptors(streams: tuple[int, int, int], pass_fds: Collection[int]) -> None:
    """Keep those that a new process would have been given."""
    for fd, given in enumerate(streams):
        if given == subprocess.DEVNULL:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        elif given >= 0:
            os.dup2(given, fd)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in pass_fds:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))


def _enter_network(name: str) -> None:
    """Be in a network namespace from now on, as `ip netns exec NAME` is. For root."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as network:
        if libc.setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def _forget_signals() -> None:
    """Handle signals as a new Python does. What is ignored stays so."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _fork_for_the_product() -> None:
    """Have this process, and those that it forks, fork where the product starts a process."""
    shim = SimpleNamespace(
        Popen=ForkedChild, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    for name in ("runtime.launcher.hosts.local", "grammar_proc.children"):
        vars(importlib.import_module(name))["subprocess"] = shim


class WarmProcess:
    """A process that the stock has forked, as its `subprocess.Popen` would show it."""

    def __init__(self, pid: int, status: int) -> None:
        """`status`: a descriptor that says its exit code, once."""
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: BinaryIO | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal; None while it runs."""
        if self.returncode is None and _is_readable(self._status, 0.0):
            said = os.read(self._status, 16)
            self.returncode = int(said) if said else GONE
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return as `poll`, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            _is_readable(self._status, timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Stock:
    """The process that forks launches, as the test process sees it."""

    def __init__(self) -> None:
        """Start it. It ends when this process does."""
        self._environment = child_environment()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.harness.warm_start"],
                stdin=theirs.fileno(),
                cwd=ROOT,
                env=self._environment,
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End it, and wait for that: what launches have cost is then a part of what this process has."""
        self._control.close()
        self._process.wait()

    def may_start(self, environment: Mapping[str, str]) -> bool:
        """Return True if the processes of a ring may have this environment: it is not what libraries read as
        they are loaded that differs.
        """
        return not self.differences(environment)

    def differences(self, environment: Mapping[str, str]) -> set[str]:
        """Return the names of the variables that keep it from starting processes with this environment."""
        names = self._environment.keys() | environment.keys()
        return {
            name
            for name in names
            if self._environment.get(name) != environment.get(name)
            and name != "PYTEST_CURRENT_TEST"
            and (not name.startswith(READ_LATER) or name == "CAROUSEL_CPU_ISA")
        }

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int,
        stderr: int,
        start_new_session: bool = False,
        network: str = "",
    ) -> WarmProcess:
        """Start `python -m MODULE ARGUMENT ...`, which writes to these descriptors."""
        ours, theirs = socket.socketpair()
        request = json.dumps(
            [module, list(arguments), dict(environment), start_new_session, network]
        ).encode()
        with theirs:
            socket.send_fds(self._control, [request], [stdout, stderr, theirs.fileno()])
        if not (pid := self._control.recv(16)):
            raise RuntimeError("the process that forks launches has ended")
        return WarmProcess(int(pid), ours.detach())


_is_used = False


def use_warm_starts() -> None:
    """Have launches under test forked from now on, where they can be."""
    global _is_used
    _is_used = True


@cache
def stock() -> Stock:
    """Return the process that forks this process's launches."""
    return Stock()


def left_behind() -> set[str]:
    """Return the names of variables that tests have left, and that keep launches from being forks."""
    return stock().differences(child_environment()) if stock.cache_info().currsize else set()


def _may_be_warm(arguments: Sequence[str]) -> bool:
    is_cold = any(argument.startswith(COLD_FLAGS) for argument in arguments)
    return _is_used and not is_cold and stock().may_start(child_environment())


def try_warm_start(
    module: str, arguments: Sequence[str], output: int, network: str = ""
) -> WarmProcess | None:
    """Start a launch that writes to the descriptor `output`, in a network namespace if that is named; None
    where it has to be a new process.
    """
    if module not in MODULES or not _may_be_warm(arguments):
        return None
    return stock().start(module, arguments, os.environ, stdout=output, stderr=output, network=network)


def start_own_runtimes_warm(own_runtime: ModuleType) -> None:
    """Have `carousel.client.own_runtime`, given as itself, fork runtimes, too."""
    plain = subprocess.Popen

    def popen(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        arguments = command[command.index("-m") + 2 :]
        # A test that has a process of its own in the place of any other gets to see this one.
        if subprocess.Popen is not plain or not _may_be_warm(arguments):
            return subprocess.Popen(command, env=env, **options)
        reader, writer = os.pipe()
        with open(os.devnull, "wb") as nowhere, os.fdopen(writer, "wb"):
            process = stock().start(
                OWN_RUNTIME, arguments, env, stdout=nowhere.fileno(), stderr=writer, start_new_session=True
            )
        process.stderr = os.fdopen(reader, "rb")
        return process

    vars(own_runtime)["subprocess"] = SimpleNamespace(
        Popen=popen, **{name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    )


def main(control: socket.socket) -> None:
    """Fork a process for each request that comes, and say how it has ended, until the other end closes."""
    for name in (*IMPORTED, *MAINS):
        importlib.import_module(name)
    _fork_for_the_product()
    # Its first call finds the memory that titles are written to, before the environment moves.
    importlib.import_module("setproctitle").setproctitle("warm starts")
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # beside a thread
    gc.collect()
    gc.freeze()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)  # it is the launches' to end, or the test's
    running: dict[int, tuple[ForkedChild, int]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                child, status = running.pop(fd)
                with contextlib.suppress(OSError):  # nobody asks any more
                    os.write(status, str(child.wait()).encode())
                poll.unregister(fd)
                os.close(fd)
                os.close(status)
                continue
            data, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
            if not data:
                return
            stdout, stderr, status = fds
            module, arguments, environment, new_session, network = json.loads(data)
            child = ForkedChild(
                ["-m", module, *arguments],
                stdout=stdout,
                stderr=stderr,
                start_new_session=new_session,
                network=network,
                env=environment,
            )
            os.close(stdout)
            os.close(stderr)
            pidfd = os.pidfd_open(child.pid)
            running[pidfd] = child, status
            poll.register(pidfd, select.POLLIN)
            control.send(str(child.pid).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=os.dup(0)))
