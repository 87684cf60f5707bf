"""Resources of processes: memory and descriptors, as the kernel counts them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def memory_mb(pids: Iterable[int]) -> dict[int, int]:
    """Resident memory of each process that lives, in MB."""
    found: dict[int, int] = {}
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "VmRSS:" in status:  # a zombie has none
            found[pid] = int(status.partition("VmRSS:")[2].split()[0]) // 1024
    return found


def num_descriptors(pids: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pid in pids:
        try:
            found[pid] = len(os.listdir(f"/proc/{pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
