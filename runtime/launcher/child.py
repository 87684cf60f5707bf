"""Entry of the processes that the launcher starts:
`python -m runtime.launcher.child PARENT OOM_SCORE MODULE ARGUMENT ...`.

Before the module is imported, which takes seconds with torch, it ties the process to its launcher, sets its
OOM score, makes a fault signal from another process count as a kill, and ignores SIGTTOU, which would stop a
background process that writes to its terminal. Then it runs the module as `python -m MODULE ARGUMENT ...`
would.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

from runtime.base.parent import die_with_parent

OOM_SCORE_FILE = Path("/proc/self/oom_score_adj")
MAX_OOM_SCORE = 1000
FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


def raise_oom_score(by: int) -> None:
    """Raise this process's OOM score by `by`, up to the maximum, so that the kernel kills it sooner when
    memory is short. Does nothing where /proc is read-only.
    """
    with contextlib.suppress(OSError):  # fails if /proc is read-only; nothing depends on it
        inherited = int(OOM_SCORE_FILE.read_text())
        OOM_SCORE_FILE.write_text(str(min(MAX_OOM_SCORE, inherited + by)))


def tell_faults_apart() -> None:
    """Make a fault signal that another process sends end this process by SIGKILL, so that it does not count
    as a fault of its own.

    The signals are blocked, and a thread that waits for them learns the sender. The kernel still kills at
    once for a fault of the process itself. Call it before there are threads.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FAULTS)
    threading.Thread(target=_take_fault, name="faults", daemon=True).start()


def _take_fault() -> None:
    info = signal.sigwaitinfo(FAULTS)
    name = signal.Signals(info.si_signo).name
    if info.si_code <= 0 and info.si_pid != os.getpid():
        import logging  # imported late: the process has configured its log by now

        logging.getLogger(__name__).warning("process %d has sent %s", info.si_pid, name)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FAULTS)
    os.kill(os.getpid(), info.si_signo)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    raise_oom_score(int(sys.argv[2]))
    tell_faults_apart()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # may write to a terminal as a background process
    module = sys.argv[3]
    del sys.argv[1:4]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
