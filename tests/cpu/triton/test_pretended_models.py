"""Models that compute, or are loaded, in other ways: on the pretended GPU, from checkpoint to tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from model_worker.device import make_device
from model_worker.executors.inproc import InprocExecutor
from model_worker.kernels.fp8_rows import FP8, LARGEST
from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.layers.rotary import reorder_rows
from model_worker.load_worker import load_worker
from model_worker.worker import ModelWorker, WorkerStep
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import unpack_ids
from runtime.wire.plan import BatchPlan, SampleMasks
from runtime.wire.sampling_params import SamplingParams
from tests.harness.models.model_registry import CASES
from tests.harness.models.no_waits import no_waits
from tests.harness.models.plans import FEEDBACK, VOCAB, PlanWriter, save_tiny_llama
from tests.harness.models.reference import make_checkpoint
from tests.harness.pretended_gpu import pretended_gpu
from tests.harness.ring.serving_ring import Ring, Setting

PROMPTS = [[1, 5, 9, 33, 2, 71, 8], [7, 7, 50, 21], [2] * 21]
SAMPLING = [SamplingParams(max_tokens=4, temperature=0.0, seed=1, ignore_eos=True)] * len(PROMPTS)


class SetRing(Ring):
    """With settings of a server that Setting has not."""

    def __init__(self, path: Path, device: str, *, chunk: int = 16, **settings: Any) -> None:
        self._settings = settings
        setting = Setting(page_size=4, pool_tokens=256, max_rows=3, chunk=chunk, device=device)
        super().__init__(path, setting)

    def make_executor(self, config: RuntimeConfig, setting: Setting) -> InprocExecutor:
        config = structs.replace(config, **self._settings)
        worker = load_worker(config, make_device(config.device, threaded=False), lambda: None)
        return InprocExecutor(worker, max_in_flight=2)


def tokens(path: Path, device: str, **settings: Any) -> list[list[int]]:
    """Greedy ones; on a GPU the second time without a wait."""
    ring = SetRing(path, device, **settings)
    try:
        first = ring.generate(PROMPTS, SAMPLING, solo=False)
        if device == "cpu":
            return first
        with no_waits():
            second = ring.generate([prompt[::-1] for prompt in PROMPTS], SAMPLING, solo=False)
        assert first != second
        return first
    finally:
        ring.close()


def make_worker(path: Path, device: str, **settings: Any) -> ModelWorker:
    sizes: dict[str, Any] = {"context_length": 64, "max_running_requests": 2, "max_total_tokens": 256}
    sizes |= {"page_size": 4, "dtype": "float32", "device": device, "chunked_prefill_size": 12}
    config = RuntimeConfig(model=str(path), **sizes, **settings)
    return load_worker(config, make_device(device, threaded=False), lambda: None)


def vectors(path: Path, device: str, pooling: str) -> list[np.ndarray]:
    """Return the vectors of two sequences, one of them in two chunks."""
    worker, plans = make_worker(path, device, task="embed", pooling=pooling), PlanWriter(4)
    plans.open_row(0, PROMPTS[0], [1, 2])
    plans.open_row(1, PROMPTS[1], [3])
    chunks = [[(0, PROMPTS[0][:4], False), (1, PROMPTS[1], True)], [(0, PROMPTS[0][4:], True)]]
    steps = [worker.launch(plans.plan(chunks=each)) for each in chunks]
    for step in steps:
        step.result()
    worker.close()
    return [np.frombuffer(frame, np.float32) for step in steps for frame in step.frames]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_the_cpu(pooling: str, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with pretended_gpu():
        got = vectors(tmp_path, "cuda", pooling)
    assert len(got) == 2
    for vector, expected in zip(got, vectors(tmp_path, "cpu", pooling), strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def masked_tokens(path: Path, device: str) -> list[list[int]]:
    """Return the tokens of two rows whose masks come late: after a prompt, after a decode of one of them, not
    at all, and for each place of a row with guesses.
    """
    sizes = {"cuda_graph_bs": "2"} if device == "cuda" else {}
    worker, plans = make_worker(path, device, **sizes), PlanWriter(4)
    for row in range(2):
        plans.open_row(row, PROMPTS[row], [1 + 4 * row + at for at in range(4)], temperature=0.0)

    def masked(plan: BatchPlan, *allowed: tuple[int, list[int]]) -> WorkerStep:
        bits = [(row, np.bincount(ids, minlength=VOCAB).astype(bool)) for row, ids in allowed]
        masks = [(row, np.packbits(each, bitorder="little").tobytes()) for row, each in bits]
        step = worker.launch(plan)
        worker.sample(step, SampleMasks(plan.step, tuple(masks)))
        return step

    decodes = [(0, FEEDBACK), (1, FEEDBACK)]
    prompts = [(row, PROMPTS[row], True) for row in range(2)]
    steps = [
        masked(plans.plan(chunks=prompts, defer_sampling=True), (0, [5, 6]), (1, [7, 60])),
        masked(plans.plan(decodes=decodes, defer_sampling=True), (1, [8, 9])),
        worker.launch(plans.plan(decodes=decodes)),
    ]
    guesses = plans.plan(
        decodes=[(1, FEEDBACK)],
        chunks=[(0, [FEEDBACK, 20, 21], True)],
        drafts={0: 2},
        defer_sampling=True,
    )
    steps.append(masked(guesses, (1, [30]), (0, [20]), (0, [22, 23])))
    plans.accept(0, 2)
    steps.append(worker.launch(plans.plan(decodes=decodes)))
    tokens = [unpack_ids(step.result().tokens).tolist() for step in steps]
    worker.close()
    return tokens


def test_masks_that_come_late_are_those_of_the_cpu(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with pretended_gpu():
        got = masked_tokens(tmp_path, "cuda")
    assert got == masked_tokens(tmp_path, "cpu")
    assert (got[0][0] in (5, 6), got[0][1] in (7, 60), got[1][1] in (8, 9)) == (True, True, True)
    assert got[3][:2] == [30, 20]
    assert got[3][2] in (22, 23)
    assert len(got[3]) == 3


def save_as_fp8(path: Path, kv_scale: KVScale = UNSCALED) -> None:
    """The checkpoint's linear layers with a scale for each of them, as its config says then.

    Keys and values are kv_scale times as large as they were, for which queries and what reads values make up.
    """
    file, config = path / "model.safetensors", path / "config.json"
    factors = {"q": 1 / kv_scale.key, "k": kv_scale.key, "v": kv_scale.value, "o": 1 / kv_scale.value}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        attention, _, projection = name.removesuffix("_proj.weight").rpartition(".")
        tensor = tensor * factors.get(projection, 1.0)
        if projection in "kv":
            stored[f"{attention}.{projection}_scale"] = torch.tensor(factors[projection])
        scale = tensor.abs().max() / LARGEST
        stored |= {name: (tensor / scale).to(FP8), f"{name}_scale": scale}
    save_file(stored, file)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))


def tokens_in_float8(model: Path, path: Path, kv_scale: KVScale, **settings: Any) -> list[list[int]]:
    """Return the tokens of the model with weights, keys and values of 8 bits, on a GPU. path: for its
    checkpoint.
    """
    shutil.copytree(model, path)
    save_as_fp8(path, kv_scale)
    return tokens(path, "cuda", dtype="bfloat16", kv_cache_dtype="fp8_e4m3", **settings)


@pytest.mark.parametrize(
    "case", ["llama_dynamic", "qwen3_moe", pytest.param("gemma2", marks=pytest.mark.full)]
)
def test_a_family_has_the_tokens_of_the_cpu(case: str, tmp_path: Path) -> None:
    """Frequencies that depend on the position; windows, soft-caps and four norms; experts."""
    make_checkpoint(CASES[case], tmp_path)
    with pretended_gpu():
        got = tokens(tmp_path, "cuda", cuda_graph_bs="3")
    assert got == tokens(tmp_path, "cpu")


def test_modules_of_the_transformers_library_have_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with pretended_gpu():
        got = tokens(tmp_path, "cuda", model_impl="transformers")
    assert got == tokens(tmp_path, "cpu", model_impl="transformers")


def test_rows_of_eight_bits_are_reordered_on_a_gpu_as_on_the_cpu() -> None:
    """The rows are of a checkpoint that rotates neighbours."""
    weight = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).to(FP8)
    change = reorder_rows([0, 2, 1, 3], num_heads=2)
    expected = change(weight.float())
    assert torch.equal(change(weight).float(), expected)
    with torch.inference_mode(), pretended_gpu():
        assert torch.equal(change(weight.to("cuda")).cpu().float(), expected)
