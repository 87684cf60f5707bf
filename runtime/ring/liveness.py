"""Signs of life of a ring's processes that anybody on the machine may look for."""

from __future__ import annotations

from pathlib import Path

from runtime.settings.config import RuntimeConfig
from runtime.wire.status_page import ProcessStatus


def is_stopped(pid: int) -> bool:
    """Return True for a process that a signal has stopped; one that a debugger holds is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[:1] == [b"T"]


def may_be_silent(role: str, config: RuntimeConfig, scheduler: ProcessStatus) -> bool:
    """Return True if a process of `role` may be in a step of the model, in which it turns no loop."""
    if role == "worker" or (role == "scheduler" and config.device != "cpu"):
        # Without overlap the scheduler has written its slot before it launches the step that it waits for.
        is_unseen = role == "scheduler" and config.disable_overlap_schedule
        return is_unseen or scheduler.num_launched > scheduler.num_finished
    return False
