"""Recorded decode steps against eager ones: the real scheduler and worker, a device whose graphs are reruns.

On a GPU a replay repeats launches; here it calls the function that was recorded. Whatever that function takes
from the host instead of from the device would be the value of the recording, so it shows here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from triton.runtime.errors import OutOfResources

from model_worker.device.cpu import CpuDevice, Rerun
from model_worker.executors.inproc import InprocExecutor
from model_worker.worker import load_worker
from runtime.config import RuntimeConfig
from runtime.errors import ConfigError
from runtime.sampling_params import SamplingParams
from tests.cpu.plans import save_tiny_llama
from tests.cpu.ring import Ring, Setting
from tests.cpu.waits import CountWaits

PROMPTS = [[1, 5, 9, 33, 2, 71, 8], [7, 7, 50, 21], [96, 3, 14, 15, 92]]
SIZES = "1,2,4"


class GraphDevice(CpuDevice):
    """A CPU that is taken for a GPU: Triton's kernels (interpreted) and graphs."""

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


class GraphRing(Ring):
    device: GraphDevice

    def make_executor(self, config: RuntimeConfig, setting: Setting) -> InprocExecutor:
        self.device = GraphDevice()
        config = structs.replace(config, cuda_graph_bs=SIZES)
        worker = load_worker(config, self.device, lambda: None)
        return InprocExecutor(worker, max_in_flight=2 if setting.overlap else 1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def setting() -> Setting:
    # Pages of four tokens: nearly each step writes new entries of the page table.
    return Setting(page_size=4, pool_tokens=256, max_rows=4)


@pytest.fixture(scope="module")
def recorded(model_path: Path, setting: Setting) -> Iterator[GraphRing]:
    ring = GraphRing(model_path, setting)
    yield ring
    ring.close()


@pytest.fixture(scope="module")
def eager(model_path: Path, setting: Setting) -> Iterator[Ring]:
    ring = Ring(model_path, replace(setting, overlap=False))
    yield ring
    ring.close()


KINDS = {
    "greedy": [SamplingParams(max_tokens=7, temperature=0.0, seed=1)] * 3,
    "seeded": [SamplingParams(max_tokens=6, temperature=0.9, seed=n) for n in range(3)],
    "truncated beside greedy": [
        SamplingParams(max_tokens=6, temperature=0.0, seed=1),
        SamplingParams(max_tokens=9, temperature=1.1, top_k=9, seed=2),
        SamplingParams(max_tokens=5, temperature=0.8, top_p=0.8, min_p=0.01, seed=3),
    ],
    "more than a draw": [
        SamplingParams(max_tokens=6, temperature=0.7, frequency_penalty=0.8, seed=1),
        SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, seed=2),
        SamplingParams(max_tokens=6, temperature=0.8, bad_words_ids=((3, 4),), seed=3),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_decodes_make_the_tokens_of_eager_ones(recorded: GraphRing, eager: Ring, kind: str) -> None:
    """Three rows in a batch of four, then, as they end, two and one: every size, padded and not. And no step
    waits for the device, those with chunks of prompts and the sampler's own work among them.
    """
    before = recorded.device.num_replays
    with CountWaits() as waits:
        got = recorded.generate(PROMPTS, KINDS[kind], solo=False)
    assert waits.seen == []
    assert got == eager.generate(PROMPTS, KINDS[kind], solo=True)
    # Each token but the first is a forward; a draw, too, unless a row needs more.
    decodes = max(len(tokens) for tokens in got) - 1
    per_step = 1 if kind == "more than a draw" else 2
    assert recorded.device.num_replays - before >= per_step * decodes


def test_padding_touches_no_row_and_no_page_but_its_own(recorded: GraphRing) -> None:
    recorded.generate(PROMPTS, KINDS["greedy"], solo=False)
    runner = recorded._executor._worker._runner
    assert runner._table.page_table[:-1].any()
    assert not runner._table.page_table[-1].any()


def test_a_wait_is_seen() -> None:
    values = torch.arange(3)
    with torch.inference_mode(), CountWaits() as waits:
        int(values.max())
        values[values > 1]
        values.tolist()
    assert len(waits.seen) >= 3


def test_no_memory_for_a_recording_names_what_to_turn(model_path: Path, setting: Setting) -> None:
    class FullDevice(GraphDevice):
        def capture(self, fn: Callable[[], None]) -> Rerun:
            raise torch.OutOfMemoryError("CUDA out of memory")

    config = RuntimeConfig(
        model=str(model_path),
        dtype="float32",
        device="cuda",
        context_length=64,
        max_running_requests=4,
        max_total_tokens=256,
    )
    with pytest.raises(ConfigError, match=r"4 rows.*--mem-fraction-static.*--cuda-graph-max-bs"):
        load_worker(config, FullDevice(), lambda: None)


def test_a_kernel_that_does_not_fit_the_gpu_ends_the_start_with_what_to_do(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SmallDevice(GraphDevice):
        launch_errors = (OutOfResources,)

    def does_not_fit(*arguments: object, **keywords: object) -> None:
        raise OutOfResources(152_128, 101_376, "shared memory")

    monkeypatch.setattr("model_worker.attention.triton.decode_attention", does_not_fit)
    config = RuntimeConfig(
        model=str(model_path),
        dtype="float32",
        device="cuda",
        context_length=64,
        max_running_requests=2,
        max_total_tokens=256,
        disable_cuda_graph=True,
    )
    with pytest.raises(ConfigError, match=r"Required: 152128, Hardware limit: 101376.*--dtype bfloat16"):
        load_worker(config, SmallDevice(), lambda: None)


def test_a_kv_cache_of_eight_bits_has_twice_the_pages(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RoomyDevice(GraphDevice):
        def free_bytes(self) -> int:
            return 8 << 20

    def num_pages(kv_cache_dtype: str) -> int:
        config = RuntimeConfig(
            model=str(model_path),
            dtype="float16",
            device="cuda",
            context_length=64,
            max_running_requests=2,
            disable_cuda_graph=True,
            kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        )
        worker = load_worker(config, RoomyDevice(), lambda: None)
        worker.close()
        return worker.limits.num_pages

    wide, narrow = num_pages("auto"), num_pages("fp8_e4m3")
    assert 2 * (wide + 1) <= narrow + 1 <= 2 * (wide + 1) + 1  # with the dummy page, which is not counted
    monkeypatch.setattr("model_worker.worker.has_fp8", lambda: False)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: .*8\.9"):
        num_pages("fp8_e4m3")


def test_what_the_graphs_take_is_not_given_to_the_kv_cache(model_path: Path) -> None:
    """Recordings that take a mebibyte each, of a device with 64: the pool's share is of what they leave."""

    class SmallDevice(GraphDevice):
        def __init__(self) -> None:
            super().__init__()
            self.num_kept = 0

        def capture(self, fn: Callable[[], None]) -> Rerun:
            graph = super().capture(fn)
            device = self
            device.num_kept += 1

            class Kept(Rerun):
                def __del__(self) -> None:
                    device.num_kept -= 1

            return Kept(graph.replay)

        def free_bytes(self) -> int:
            return (64 - self.num_kept) << 20

    config = RuntimeConfig(
        model=str(model_path),
        dtype="float32",
        device="cuda",
        context_length=64,
        max_running_requests=8,
        cuda_graph_bs="1,2,4,8",
        mem_fraction_static=0.5,
    )
    worker = load_worker(config, SmallDevice(), lambda: None)
    pool = worker._runner.kv_pool
    graphs = 4 * 3  # a forward and two draws of each size
    assert worker.limits.num_pages == ((64 - graphs) << 20) // 2 // pool.bytes_per_page() - 1
    worker.close()
