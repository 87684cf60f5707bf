"""One thread per test process: tiny models gain nothing from a second, and two teams on two cores stall each
other. And Triton as its own interpreter, so that its kernels run without a GPU.
"""

from __future__ import annotations

import os

# Triton reads it when it is first imported, which torch and transformers may do at any time. Processes that
# a test starts inherit it; a launch on a CPU uses no Triton. tests/gpu runs in a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.set_num_threads(1)
