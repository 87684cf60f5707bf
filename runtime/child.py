"""Entry of the processes that the launcher starts:
`python -m runtime.child PARENT OOM_SCORE MODULE ARGUMENT ...`.

Before anything else, because importing torch takes seconds, it ties the process to its launcher and says how
soon the kernel shall kill it when memory is short. Then it runs the module as `python -m MODULE ARGUMENT ...`
would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
OOM_SCORE_FILE = Path("/proc/self/oom_score_adj")
MAX_OOM_SCORE = 1000


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; end it now when that is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def raise_oom_score(by: int) -> None:
    """Be killed sooner than others when memory is short. Everybody may ask for that for himself."""
    with contextlib.suppress(OSError):  # where /proc is read-only; nothing depends on it
        inherited = int(OOM_SCORE_FILE.read_text())
        OOM_SCORE_FILE.write_text(str(min(MAX_OOM_SCORE, inherited + by)))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    raise_oom_score(int(sys.argv[2]))
    module = sys.argv[3]
    del sys.argv[1:4]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
