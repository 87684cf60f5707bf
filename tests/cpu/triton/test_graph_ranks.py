"""Recorded decode steps of two ranks, collectives included, against one rank's eager ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs
from torch import Tensor

from model_worker.attention.triton import TritonAttention
from model_worker.device import Device
from model_worker.device.cpu import CpuDevice, Rerun
from model_worker.executors.inproc import InprocExecutor
from runtime.config import RuntimeConfig
from runtime.sampling_params import SamplingParams
from tests.cpu.native import needs_compiler
from tests.cpu.plans import save_tiny_llama
from tests.cpu.rank_ring import RankRing
from tests.cpu.ring import Ring, Setting
from tests.cpu.triton.test_graph_runner import PROMPTS

pytestmark = needs_compiler

INTERPRETER = threading.Lock()
KINDS = {
    "a draw": [SamplingParams(max_tokens=n, temperature=0.9, seed=n) for n in (5, 3, 4)],
    "more than a draw": [SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, seed=1)],
}


class GraphDevice(CpuDevice):
    """A CPU that is taken for a GPU: Triton's kernels (interpreted) and graphs, whose replays are reruns. The
    pretended GPU is one for a thread, and ranks are threads here.
    """

    name = "cuda"
    prefers_one_pass = True

    def __init__(self) -> None:
        super().__init__(threaded=False)
        self.num_replays = 0

    def capture(self, fn: Callable[[], None]) -> Rerun:
        fn()

        def counted() -> None:
            self.num_replays += 1
            fn()

        return Rerun(counted)


class AttentionInTurns(TritonAttention):
    """Ranks are threads here, and Triton's interpreter is one for the process."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with INTERPRETER:
            return super().forward(*args, **kwargs)


class GraphRankRing(RankRing):
    def make_executor(self, config: RuntimeConfig, setting: Setting) -> InprocExecutor:
        self.devices: dict[int, GraphDevice] = {}
        config = structs.replace(
            config, cuda_graph_bs="1,4", attention_backend=f"{__name__}:{AttentionInTurns.__name__}"
        )
        return super().make_executor(config, setting)

    def make_device(self, rank: int, setting: Setting) -> Device:
        self.devices[rank] = GraphDevice()
        return self.devices[rank]


def test_recorded_steps_of_two_ranks_make_the_tokens_of_one(tmp_path: Path) -> None:
    """Padded and not; rank 0 draws by a recording or by the sampler, rank 1 is told either way."""
    save_tiny_llama(tmp_path)
    setting = Setting(page_size=4, pool_tokens=256, max_rows=4)
    alone = Ring(tmp_path, setting)
    ranks = GraphRankRing(tmp_path, setting, 2, tmp_path / "ranks")
    try:
        for kind, sampling in KINDS.items():
            before = [ranks.devices[rank].num_replays for rank in range(2)]
            prompts = PROMPTS[: len(sampling)]
            got = ranks.generate(prompts, sampling, solo=False)
            assert got == alone.generate(prompts, sampling, solo=False), kind
            forwards = max(len(tokens) for tokens in got) - 1
            made = [ranks.devices[rank].num_replays - before[rank] for rank in range(2)]
            assert made[1] >= forwards
            assert made[0] == (made[1] if kind == "more than a draw" else 2 * made[1])
    finally:
        ranks.close()
        alone.close()
