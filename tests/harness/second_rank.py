"""A second rank in a process of its own, which comes to one call and not to the next. Its argument: where the
ranks meet.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

from tests.harness.models.rank_threads import join_shared_memory

if __name__ == "__main__":
    group = join_shared_memory(Path(sys.argv[1]), 1, 2)
    group.all_reduce(torch.ones(4))
    signal.pause()
