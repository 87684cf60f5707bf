"""Recorded decode steps, on the pretended GPU, against the CPU's; and what recordings do to its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.device import make_device
from model_worker.device.cuda import CudaDevice
from model_worker.load_worker import load_worker
from model_worker.runner.recording.graph_runner import GraphRunner, verification_sizes
from model_worker.runner.sampled_places import has_drafts
from model_worker.worker import ModelWorker
from runtime.base.errors import ConfigError
from runtime.settings.config import RuntimeConfig
from runtime.wire.plan import BatchPlan
from runtime.wire.sampling_params import SamplingParams
from tests.cpu.triton.test_pretended_models import SetRing
from tests.harness.models.no_waits import no_waits
from tests.harness.models.plans import pages_of, save_tiny_llama
from tests.harness.models.speculation import (
    SAMPLINGS,
    Generation,
    Output,
    Proposer,
    assert_same,
    from_outputs,
    launched_on,
    no_guesses,
)
from tests.harness.pretended_gpu import PretendedGpu, pretended_gpu

PROMPTS = [[1, 5, 9, 33, 2, 71, 8], [7, 7, 50, 21], [96, 3, 14, 15, 92]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def recorded(model_path: Path, gpu: PretendedGpu) -> Iterator[SetRing]:
    ring = SetRing(model_path, "cuda", cuda_graph_bs="1,4", max_running_requests=4)
    yield ring
    ring.close()


@pytest.fixture(scope="module")
def on_cpu(model_path: Path) -> Iterator[SetRing]:
    ring = SetRing(model_path, "cpu")
    yield ring
    ring.close()


KINDS = {
    "greedy": [SamplingParams(max_tokens=5, temperature=0.0, seed=1)] * 3,
    "seeded": [SamplingParams(max_tokens=n + 3, temperature=0.9, seed=n) for n in range(3)],
    "truncated beside greedy": [
        SamplingParams(max_tokens=4, temperature=0.0, seed=1),
        SamplingParams(max_tokens=6, temperature=1.1, top_k=9, seed=2),
        SamplingParams(max_tokens=5, temperature=0.8, top_p=0.8, min_p=0.01, seed=3),
    ],
    "within deviations": [
        SamplingParams(max_tokens=4, temperature=3.0, top_n_sigma=0.8, seed=1),
        SamplingParams(max_tokens=5, temperature=2.0, top_n_sigma=1.5, top_k=40, top_p=0.9, seed=2),
        SamplingParams(max_tokens=4, temperature=1.0, seed=3),
    ],
    "more than a draw": [
        SamplingParams(max_tokens=3, temperature=0.7, frequency_penalty=0.8, seed=1),
        SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, seed=2),
        SamplingParams(max_tokens=5, temperature=0.8, bad_words_ids=((3, 4),), seed=3),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_decodes_make_the_tokens_of_the_cpu(
    gpu: PretendedGpu, recorded: SetRing, on_cpu: SetRing, kind: str
) -> None:
    """Three rows in a batch of four, then, as they end, two and one: padded and not. And no step
    waits for the device, those with chunks of prompts and the sampler's own work among them.
    """
    before = gpu.num_replays
    with no_waits():
        got = recorded.generate(PROMPTS, KINDS[kind], solo=False)
    assert got == on_cpu.generate(PROMPTS, KINDS[kind], solo=True)
    # Each token but the first is a forward; a draw, too, unless a row needs more.
    decodes = max(len(tokens) for tokens in got) - 1
    per_step = 1 if kind == "more than a draw" else 2
    assert gpu.num_replays - before >= per_step * decodes


def test_padding_touches_no_row_and_no_page_but_its_own(recorded: SetRing) -> None:
    two = [SamplingParams(max_tokens=2, temperature=0.0, seed=1)] * 2
    recorded.generate(PROMPTS[:2], two, solo=False)
    runner = recorded._executor._worker._runner
    assert runner._tables.pages.page_table[:-1].any()
    assert not runner._tables.pages.page_table[-1].any()


def config(model_path: Path, **settings: Any) -> RuntimeConfig:
    options = {"dtype": "float32", "device": "cuda", "context_length": 64, "max_running_requests": 4}
    options["chunked_prefill_size"] = 8  # the interpreter takes its time
    return RuntimeConfig(model=str(model_path), **{**options, **settings})


@pytest.mark.usefixtures("gpu")
def test_no_memory_for_a_recording_names_what_to_turn(model_path: Path) -> None:
    class FullDevice(CudaDevice):
        def capture(self, fn: Callable[[], None]) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match=r"4 rows.*--cuda-graph-max-bs.*--mem-fraction-static"):
        load_worker(config(model_path), FullDevice(threaded=False), lambda: None)


def test_a_model_that_does_not_fit_is_a_setting_to_change(model_path: Path) -> None:
    with (
        pretended_gpu(1 << 16),
        pytest.raises(ConfigError, match=r"while loading.*--dtype.*--tp-size.*taken"),
    ):
        load_worker(config(model_path), CudaDevice(threaded=False), lambda: None)


@pytest.mark.usefixtures("gpu")
def test_a_kv_cache_of_eight_bits_has_twice_the_pages(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RoomyDevice(CudaDevice):
        def free_bytes(self, *, cached: bool = True) -> int:
            return 8 << 20

    def num_pages(kv_cache_dtype: str) -> int:
        settings = {"dtype": "float16", "disable_cuda_graph": True, "kv_cache_dtype": kv_cache_dtype}
        worker = load_worker(config(model_path, **settings), RoomyDevice(threaded=False), lambda: None)
        worker.close()
        return worker.limits.num_pages

    wide, narrow = num_pages("auto"), num_pages("fp8_e4m3")
    assert 2 * (wide + 1) <= narrow + 1 <= 2 * (wide + 1) + 1  # with the dummy page, which is not counted
    monkeypatch.setattr("model_worker.load_worker.has_fp8", lambda: False)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: .*8\.9"):
        num_pages("fp8_e4m3")


@pytest.mark.usefixtures("gpu")
def test_what_the_graphs_take_is_not_given_to_the_kv_cache(model_path: Path) -> None:
    """Recordings that take a mebibyte each, of a device with 64: the pool's share is of what they leave."""

    class SmallDevice(CudaDevice):
        num_kept = 0

        def capture(self, fn: Callable[[], None]) -> Any:
            device = self
            device.num_kept += 1

            class Kept:  # nobody replays it
                def __del__(self) -> None:
                    device.num_kept -= 1

            return Kept()

        def free_bytes(self, *, cached: bool = True) -> int:
            return (64 - self.num_kept) << 20

    settings = {"max_running_requests": 8, "cuda_graph_bs": "1,2,4,8", "mem_fraction_static": 0.5}
    worker = load_worker(config(model_path, **settings), SmallDevice(threaded=False), lambda: None)
    pool = worker._runner.kv_pool
    graphs = 4 * 3  # a forward and two draws of each size
    assert worker.limits.num_pages == ((64 - graphs) << 20) // 2 // pool.bytes_per_page() - 1
    worker.close()


NUM_TOKENS = 12
VERIFIED: dict[str, list[dict[str, Any]]] = {
    "drawn": [SAMPLINGS["greedy"], SAMPLINGS["temperature"], SAMPLINGS["top_p"]],
    "edited": [SAMPLINGS["all"], {"num_logprobs": 1}, SAMPLINGS["min_tokens"] | {"returns_logits": True}],
}


def _verify(worker: ModelWorker, kind: str, propose: Proposer = no_guesses) -> list[Output]:
    # Rows that look back wait for each of their places.
    is_free = kind == "drawn" and worker.limits.device == "cuda"
    run = launched_on(worker, no_waits if is_free else nullcontext)
    return Generation(run, 4, PROMPTS, VERIFIED[kind], pages_of).generate(NUM_TOKENS, propose, chunk=5)


VERIFYING = {"page_size": 4, "max_total_tokens": 1024}


@pytest.fixture(scope="module")
def verifying(model_path: Path, gpu: PretendedGpu) -> Iterator[ModelWorker]:
    """A worker that has recorded steps with guesses, which takes the interpreter its time."""
    settings = {"cuda_graph_bs": "1,3", "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}
    settings |= VERIFYING
    worker = load_worker(config(model_path, **settings), CudaDevice(threaded=False), lambda: None)
    yield worker
    worker.close()


@pytest.mark.parametrize("kind", VERIFIED)
def test_steps_with_guesses_make_the_tokens_of_the_cpu(
    kind: str, model_path: Path, verifying: ModelWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose rows are all behind their prompts are replayed, some with a row that has no guess."""
    cpu = config(model_path, **VERIFYING, device="cpu")
    expected = _verify(load_worker(cpu, make_device("cpu", threaded=False), lambda: None), kind)
    graphs = verifying._runner._recording
    assert isinstance(graphs, GraphRunner)
    replayed: list[BatchPlan] = []
    run = graphs.run
    monkeypatch.setattr(graphs, "run", lambda plan: (replayed.append(plan), run(plan))[1])
    for right, always in ((1.0, True), (0.7, False)):
        replayed.clear()
        assert_same(_verify(verifying, kind, from_outputs(expected, 3, right=right, always=always)), expected)
        assert sum(map(has_drafts, replayed)) >= 2


def test_sizes_with_guesses_are_powers_of_two_up_to_what_rows_may_have() -> None:
    assert verification_sizes(1, 4) == [2, 4, 5]
    assert verification_sizes(8, 4) == [2, 4, 8, 16, 32, 40]
    assert verification_sizes(200, 8) == [2, 4, 8, 16, 32, 64, 128, 256]
    assert verification_sizes(512, 1) == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert verification_sizes(512, 0) == []
