"""Signs of life of a ring's processes, which any process on the machine can check."""

from __future__ import annotations

import os

from runtime.settings.config import RuntimeConfig
from runtime.wire.status_page import ProcessStatus

STAT_BYTES = 4096
"""More bytes than the line about a process has."""


def is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped the process. Returns False if a debugger holds it."""
    try:
        # As cheap as it can be, because the launcher asks about each of its processes several times a second.
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.read(fd, STAT_BYTES)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[:1] == [b"T"]


def may_be_silent(role: str, config: RuntimeConfig, scheduler: ProcessStatus) -> bool:
    """Return True if a process of `role` may be silent because a step of the model is being computed."""
    if role == "worker" or (role == "scheduler" and config.device != "cpu"):
        # Without overlap the scheduler has written its slot before it launches the step that it waits for.
        is_unseen = role == "scheduler" and config.disable_overlap_schedule
        return is_unseen or scheduler.num_launched > scheduler.num_finished
    return False
