"""Two ranks on pretended GPUs, with NCCL's collectives launched and recorded, against the CPU's tokens of one."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from model_worker.device import make_device
from model_worker.distributed.selection import join_group
from model_worker.executors.inproc import InprocExecutor
from model_worker.worker import ModelWorker, load_worker
from runtime.config import RuntimeConfig
from runtime.plan import BatchPlan, SampleMasks
from runtime.sampling_params import SamplingParams
from tests.cpu.plans import save_tiny_llama
from tests.cpu.ring import Ring, Setting
from tests.cpu.triton.test_graph_runner import PROMPTS
from tests.pretended_gpu import PretendedGpu, pretended_gpu
from tests.pretended_gpu.rank_process import RankProcess

SETTING = Setting(page_size=4, pool_tokens=256, max_rows=4, chunk=16)
KINDS = {
    "greedy": [SamplingParams(max_tokens=4, temperature=0.0, seed=1)] * 3,
    "a draw": [SamplingParams(max_tokens=n, temperature=0.9, seed=n) for n in (5, 3, 4)],
    "more than a draw": [
        SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, seed=1),
        SamplingParams(max_tokens=4, temperature=0.7, frequency_penalty=0.8, seed=2),
    ],
}
LONG = [[3 + (7 * i + n) % 90 for i in range(40)] for n in range(3)]  # three chunks


def load_rank(rank: int, config: RuntimeConfig, folder: Path) -> ModelWorker:
    device = make_device("cuda", threaded=False, index=rank)
    group = join_group(folder, rank, 2, device.torch_device, join_timeout_s=60.0, on_wait=lambda: None)
    return load_worker(config, device, lambda: None, group)


def follow(gpu: PretendedGpu, connection: Connection, config: RuntimeConfig, folder: Path) -> None:
    """What the other rank does: as it is told, and never waiting for its GPU."""
    worker = load_rank(1, config, folder)
    steps = []
    torch.cuda.set_sync_debug_mode("error")
    while (message := connection.recv()) is not None:
        if isinstance(message, BatchPlan):
            steps.append(worker.launch(message))
        else:
            worker.sample(steps[-1], message)
        connection.send(gpu.num_replays)
    torch.cuda.set_sync_debug_mode("default")
    for step in steps:
        step.result()
    worker.close()


class Follower:
    """What `Ranks` is to an executor, for a rank of this test."""

    def __init__(self, process: RankProcess) -> None:
        self.num_replays: list[int] = []
        """Of the other rank, after each step."""
        self._process = process

    def register(self, poller: object) -> None:
        """There is no process to look at."""

    def send(self, message: BatchPlan | SampleMasks, wait: object) -> None:
        self._process.connection.send(message)

    def close(self) -> None:
        self._process.connection.send(None)
        self._process.result()


class TwoRanks(Ring):
    def __init__(self, path: Path, folder: Path, process: RankProcess, **settings: Any) -> None:
        folder.mkdir()
        self._folder, self._process, self._settings = folder, process, settings
        super().__init__(path, structs.replace)

    def make_executor(self, config: RuntimeConfig, setting: Setting) -> InprocExecutor:
        config = structs.replace(config, **self._settings)
        self._process.start(follow, config, self._folder)
        self.follower = Follower(self._process)
        return InprocExecutor(
            load_rank(0, config, self._folder),
            max_in_flight=2,
            followers=self.follower,  # type: ignore[arg-type]
        )
