"""Second rank in a separate process, which comes to one call and not to the next. Its argument is the meeting
place of the ranks.
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
