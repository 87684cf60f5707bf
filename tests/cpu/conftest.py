"""One thread per test process: tiny models gain nothing from a second, and two teams on two cores stall each
other. And Triton as its own interpreter, so that its kernels run without a GPU. And one launch for all tests
that can share it.
"""

from __future__ import annotations

import os

# Triton reads it when it is first imported, which torch and transformers may do at any time. Processes that
# a test starts inherit it; a launch on a CPU uses no Triton. tests/gpu runs in a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator

import pytest
import torch

from tests.launched import Launched, launched

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_launch() -> Iterator[Launched]:
    """The demo model as `demo`, for tests that leave nothing running. Its greedy tokens do not depend on what
    else is in the batch.
    """
    with launched(
        *("--dtype", "float32", "--cpu-threads", "1", "--max-running-requests", "8"),
        *("--gather-context-logits", "--gather-generation-logits", "--served-model-name", "demo"),
    ) as launch:
        yield launch
