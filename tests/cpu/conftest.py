"""One thread per test process: tiny models gain nothing from a second, and two teams on two cores stall each
other. And Triton as its own interpreter, so that its kernels run without a GPU. And what
several files share: one launch, one tiny model.
"""

from __future__ import annotations

import os

# Triton reads it when it is first imported, which torch and transformers may do at any time. Processes that
# a test starts inherit it; a launch on a CPU uses no Triton. tests/gpu runs in a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from carousel.client import own_runtime
from tests.harness.litellm_client import litellm
from tests.harness.ring.launched import Launched, launched
from tests.harness.warm_start import start_own_runtimes_warm

if TYPE_CHECKING:  # transformers takes seconds to import, which most tests can do without
    from transformers import LlamaForCausalLM

    from model_worker.worker import ModelWorker
    from tests.harness.models.plans import PlanWriter

__all__ = ["litellm"]

torch.set_num_threads(1)
start_own_runtimes_warm(own_runtime)


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


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    from tests.harness.models.plans import save_tiny_llama

    path = tmp_path_factory.mktemp("tiny")
    return path, save_tiny_llama(path)


@pytest.fixture
def tiny_reference(tiny_checkpoint: tuple[Path, LlamaForCausalLM]) -> LlamaForCausalLM:
    return tiny_checkpoint[1]


@pytest.fixture(params=[(1, False), (4, True), (16, False)], ids=["page1", "page4-threaded", "page16"])
def tiny_worker(
    request: pytest.FixtureRequest, tiny_checkpoint: tuple[Path, LlamaForCausalLM]
) -> Iterator[tuple[ModelWorker, PlanWriter]]:
    """A worker with the model of `tiny_checkpoint`, and who writes its plans."""
    from tests.harness.models.plans import PlanWriter, make_worker

    page_size, threaded = request.param
    worker = make_worker(tiny_checkpoint[0], page_size, threaded=threaded)
    yield worker, PlanWriter(page_size)
    worker.close()
