"""One thread per test process: tiny models gain nothing
from a second, and two teams on two cores stall each other.
"""

from __future__ import annotations

import torch

torch.set_num_threads(1)
