"""A GPU whose memory ends: at which point, what is said then, and that a server which is ready is past it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from model_worker.device import make_device
from model_worker.device.cuda import CudaDevice
from model_worker.device.out_of_memory import is_out_of_memory
from model_worker.load_worker import load_worker
from runtime.base.errors import ConfigError, ExecutorError
from runtime.settings.config import RuntimeConfig
from runtime.wire.sampling_params import SamplingParams
from tests.cpu.triton.test_pretended_models import SetRing
from tests.harness.models.plans import save_tiny_llama
from tests.harness.pretended_gpu import pretended_gpu

CHUNK = 16
SMALL = {"max_running_requests": 2, "cuda_graph_bs": "2"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


def load(model_path: Path, device: CudaDevice | None = None) -> None:
    config = RuntimeConfig(model=str(model_path), dtype="float32", device="cuda", context_length=64)
    device = device or CudaDevice(threaded=False)
    load_worker(structs.replace(config, **SMALL, chunked_prefill_size=CHUNK), device, lambda: None).close()


@pytest.mark.parametrize(
    ("num_bytes", "says"),
    [
        (100_000, r"loading the weights: .*--dtype.*--tp-size.*\(CUDA out of memory"),
        (350_000, r"recording the decode step of 2 rows: .*--disable-cuda-graph"),
        (450_000, r"a step of up to 16 tokens: lower --chunked-prefill-size"),
        (535_000, r"no room for a KV cache: .*: raise --mem-fraction-static.*--chunked-prefill-size"),
    ],
)
def test_where_memory_ends_says_what_to_turn(num_bytes: int, says: str, model_path: Path) -> None:
    """Each of them past what the one before it needs, for a model whose weights are 248,000 bytes."""
    with pretended_gpu(num_bytes), pytest.raises(ConfigError, match=says) as error:
        load(model_path)
    assert "\n" not in str(error.value)


def test_a_kv_cache_for_which_there_is_less_than_was_measured_says_so(model_path: Path) -> None:
    class OtherProgramComes(CudaDevice):
        def free_bytes(self, *, cached: bool = True) -> int:
            return super().free_bytes(cached=cached) + (1 << 20)

    with (
        pretended_gpu(800_000),
        pytest.raises(
            ConfigError, match=r"a KV cache of .*: lower --mem-fraction-static or --max-total-tokens"
        ),
    ):
        load(model_path, OtherProgramComes(threaded=False))


def test_a_full_gpu_serves_steps_as_large_as_its_settings_allow(model_path: Path) -> None:
    """Their memory is measured before the KV cache is sized, and taken before the server is ready. Without
    it a step ends with what to turn.
    """
    cut = [SamplingParams(max_tokens=2, top_p=0.9, seed=seed, ignore_eos=True) for seed in (1, 2)]
    prompts = [[3] * 30, [5] * 27]
    with pretended_gpu(800_000) as gpu:
        ring = SetRing(model_path, "cuda", chunk=CHUNK, **SMALL, max_total_tokens=0)
        memory = gpu.operations.memory
        assert memory.num_reserved < 800_000
        memory.capacity = memory.num_reserved
        assert [len(tokens) for tokens in ring.generate(prompts, cut, solo=False)] == [2, 2]
        memory.empty_cache()
        memory.capacity = memory.num_reserved + 10_000
        with pytest.raises(ExecutorError, match=r"--mem-fraction-static.*--chunked-prefill-size") as error:
            ring.generate([[*prompt[::-1], 7] for prompt in prompts], cut, solo=False)
        assert "\n" not in str(error.value)
        ring.close()


ERRORS: list[tuple[Any, bool]] = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
    (torch.AcceleratorError("CUDA error: out of memory"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("Triton Error [CUDA]: out of memory"), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    (ValueError("out of memory"), False),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_all_that_means_full_memory_is_known(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_a_gpu_that_cuda_refuses_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy\nCompile with ...")

    with pretended_gpu():
        monkeypatch.setattr(torch.cuda, "set_device", refuse)
        with pytest.raises(ConfigError, match=r"^device: GPU 0 cannot be used: .* busy$"):
            make_device("cuda", threaded=False)
