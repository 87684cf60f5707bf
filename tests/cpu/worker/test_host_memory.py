"""Memory that a CPU worker's tensors give back stays with the process."""

from __future__ import annotations

import subprocess
import sys

# How many pages the kernel has filled for ten times sixteen tensors of 8 MiB at once.
SCRIPT = """
import resource
import torch
from model_worker.device.cpu import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use_memory():
    for _ in range(10):
        kept = [torch.ones(1 << 21) for _ in range(16)]
        del kept

keep_freed_memory()
use_memory()
before = faults()
use_memory()
print(faults() - before)
"""


def test_memory_that_is_given_back_is_not_filled_anew() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    # 327,680 where all of it is. A block or two of 2,048 may not fit where the first use has left room.
    assert int(done.stdout) < 327_680 // 20
