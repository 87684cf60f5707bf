"""Two ranks on pretended GPUs, NCCL's collectives launched and recorded, against the CPU's tokens of one."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from model_worker.device import make_device
from model_worker.distributed.selection import join_group
from model_worker.executors.inproc import InprocExecutor
from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.load_worker import load_worker
from model_worker.membership import Membership
from model_worker.worker import ModelWorker, WorkerStep
from runtime.settings.config import RuntimeConfig
from runtime.wire.plan import BatchPlan
from runtime.wire.sampling_params import SamplingParams
from tests.cpu.triton.test_pretended_models import save_as_fp8
from tests.harness.models.no_waits import no_waits
from tests.harness.models.plans import save_tiny_llama
from tests.harness.pretended_gpu import PretendedGpu, pretended_gpu
from tests.harness.pretended_gpu.rank_process import RankProcess
from tests.harness.ring.serving_ring import Ring, Setting

SETTING = Setting(page_size=4, pool_tokens=256, max_rows=2, chunk=8)
PROMPTS = [[3 + 7 * i % 90 for i in range(20)], [7, 90, 50, 21]]  # of three chunks, and of one
DRAWN = [SamplingParams(max_tokens=4, temperature=0.0, seed=1), SamplingParams(max_tokens=5, seed=2)]
EDITED = [
    SamplingParams(
        max_tokens=4, temperature=0.0, frequency_penalty=0.8, logprobs=1, prompt_logprobs=1, seed=2
    )
]
CASES = {
    "recorded": ({"cuda_graph_bs": "2"}, [DRAWN, EDITED]),
    "launched": ({"disable_cuda_graph": True}, [EDITED]),
}


def load_rank(rank: int, config: RuntimeConfig, folder: Path) -> ModelWorker:
    device = make_device("cuda", threaded=False, index=rank)
    group = join_group(folder, rank, 2, device.torch_device, join_timeout_s=60.0, on_wait=lambda: None)
    return load_worker(config, device, lambda: None, Membership.of_one_stage(group))


def follow(gpu: PretendedGpu, connection: Connection, config: RuntimeConfig, folder: Path) -> int:
    """The other rank does what it is told and never waits for its GPU. How many recordings it replayed."""
    worker = load_rank(1, config, folder)
    steps: list[WorkerStep] = []
    with no_waits():
        while (message := connection.recv()) is not None:
            steps.append(worker.launch(message))
    for step in steps:
        step.result()
    worker.close()
    return gpu.num_replays


class Follower:
    """Stand-in for `Ranks`, for the other rank of this test."""

    num_replays = 0

    def __init__(self, process: RankProcess) -> None:
        self._process = process

    def register(self, poller: object) -> None:
        """Its process is the test's."""

    def send(self, message: BatchPlan, wait: object) -> None:
        self._process.connection.send(message)

    def close(self) -> None:
        self._process.connection.send(None)
        self.num_replays = self._process.result()


class TwoRanks(Ring):
    def __init__(self, path: Path, folder: Path, process: RankProcess, **settings: Any) -> None:
        folder.mkdir()
        self._folder, self._settings = folder, settings
        self.follower = Follower(process)
        self._process = process
        super().__init__(path, SETTING)

    def make_executor(self, config: RuntimeConfig, setting: Setting) -> InprocExecutor:
        config = structs.replace(config, device="cuda", **self._settings)
        self._process.start(follow, config, self._folder)
        worker = load_rank(0, config, self._folder)
        followers: Any = self.follower
        return InprocExecutor(worker, max_in_flight=2, followers=followers)


@pytest.mark.full
def test_two_ranks_divide_keys_and_values_by_the_same_scales(other: RankProcess, tmp_path: Path) -> None:
    """By powers of two, so that nothing changes but the numbers' size. Down projections are cut in parts that
    are dequantised: they are not in sixteens.
    """
    narrow = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "cuda_graph_bs": "2"}
    served = []
    with pretended_gpu(num_devices=2):
        for name, scale in (("plain", UNSCALED), ("scaled", KVScale(64.0, 2048.0))):
            save_tiny_llama(tmp_path / name)
            save_as_fp8(tmp_path / name, scale)
            ranks = TwoRanks(tmp_path / name, tmp_path / f"{name} ranks", other, **narrow)
            served.append(ranks.generate(PROMPTS, DRAWN, solo=False))
            ranks.close()
    plain, scaled = served
    assert scaled == plain


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_make_the_tokens_of_one(case: str, other: RankProcess, tmp_path: Path) -> None:
    """In chunks and decodes, with a step in flight, and nobody waits for a GPU. Rank 0 draws by a recording
    or by the sampler, rank 1 is told either way.
    """
    settings, samplings = CASES[case]
    save_tiny_llama(tmp_path)
    alone = Ring(tmp_path, SETTING)
    num_replayed = []
    with pretended_gpu(num_devices=2) as gpu:
        ranks = TwoRanks(tmp_path, tmp_path / "ranks", other, **settings)
        try:
            for sampling in samplings:
                before = gpu.num_replays
                prompts = PROMPTS[-len(sampling) :]
                with no_waits():
                    got = ranks.generate(prompts, sampling, solo=False)
                assert got == alone.generate(prompts, sampling, solo=False)
                num_replayed.append(gpu.num_replays - before)
        finally:
            ranks.close()
            alone.close()
    assert gpu.launches.count("nccl_gather") > 0
    if case == "recorded":
        drawn, edited = num_replayed
        assert ranks.follower.num_replays == drawn // 2 + edited > 0
