"""What a CPU worker's tensors give back stays with the process."""

from __future__ import annotations

import subprocess
import sys

PAGES_OF_8_MIB = 2048

# Pages that the kernel has filled for ten tensors of 8 MiB, one after the other.
SCRIPT = """
import resource, sys
import torch
from model_worker.device.cpu import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    keep_freed_memory()
torch.ones(1 << 21)
before = faults()
for _ in range(10):
    torch.ones(1 << 21)
print(faults() - before)
"""


def num_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_that_is_given_back_is_not_filled_anew() -> None:
    assert num_faults("keep") < 2 * PAGES_OF_8_MIB < num_faults("leave")
