"""--quantization int8 over whole models: every family, ranks, memory, and the tokens of the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.kernels.native.library import NativeKernels
from model_worker.layers.stored_weight import StoredWeight
from model_worker.loading.loader import load_model
from model_worker.models.transformer import CausalLM
from model_worker.ops.native_ops import BY_CPP, NativeOps
from model_worker.quant.base import QuantMethod
from model_worker.quant.int8 import Int8
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.checkpoint.model_config import ModelConfig
from runtime.settings.config import DEMO_MODEL
from tests.harness.models.model_registry import FAMILIES, QUANTIZED
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.paged_forward import PagedForward
from tests.harness.models.rank_threads import on_ranks
from tests.harness.models.reference import make_checkpoint, prompts, reference_logits

INT8 = Int8(stored=False)
# The norm of the error over that of the logits. Layers of 64 inputs have few terms over which an error
# averages: 1 to 6 %; with experts, of which another may be chosen, up to 14 %.
MAX_ERROR = 0.1
MAX_ERROR_EXPERTS = 0.25
MAX_APART = (
    0.02  # of torch and C++, which differ where the middle of two steps is rounded: measured below 1e-6
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    kernels: NativeKernels | None = None,
    quant: QuantMethod = INT8,
    group: RankGroup = SOLO,
) -> CausalLM:
    model = load_model(path, ModelConfig.from_path(path), dtype, "cpu", quant=quant, group=group)
    if kernels is not None:
        model.bind(NativeOps(kernels))
    return model


def logits_of(
    model: CausalLM, ids: list[int], kernels: NativeKernels | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    backend = None if kernels is None else CpuNativeAttention(kernels)
    return PagedForward(model, 16, dtype=dtype, backend=backend).step([(2, ids)])


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@needs_compiler
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_in_int8_stays_near_the_reference(architecture: str, tmp_path: Path) -> None:
    """By torch operations, and by the C++ kernels the same."""
    hf = make_checkpoint(next(iter(FAMILIES[architecture].cases.values())), tmp_path)
    ids = prompts()[0]
    expected = reference_logits(hf, ids)
    plain = load(tmp_path)
    layers = [module for module in plain.modules() if isinstance(module, StoredWeight)]
    dtypes = {str(layer.weight.dtype).removeprefix("torch.") for layer in layers}
    assert dtypes - {"float32"} == set(QUANTIZED)
    kernels = native_kernels()
    native = load(tmp_path, kernels=kernels)
    has_experts = plain.config.experts is not None
    got = logits_of(plain, ids)
    assert 1e-4 < relative(got, expected) < (MAX_ERROR_EXPERTS if has_experts else MAX_ERROR)
    assert relative(logits_of(native, ids, kernels), got) < MAX_APART


def _demo_ids(num: int) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, 4000, (num,), generator=generator).tolist()


@needs_compiler
def test_rows_of_the_demo_model_in_int8_do_not_depend_on_their_batch() -> None:
    kernels = native_kernels()
    model = load(DEMO_MODEL, torch.bfloat16, kernels)
    assert model.batch_dependent() == ""
    ids = _demo_ids(40)

    def run(chunk: int, beside: bool) -> torch.Tensor:
        backend = CpuNativeAttention(kernels, deterministic=True)
        forward = PagedForward(model, 16, dtype=torch.bfloat16, backend=backend)
        parts = []
        for start in range(0, len(ids), chunk):
            work = [(2, ids[start : start + chunk])]
            if beside:
                work.append((5, _demo_ids(1)))
            rows = forward.step(work)
            parts.append(rows[-len(work[0][1]) :] if len(work[0][1]) > 1 else rows[:1])
        return torch.cat(parts)

    whole = run(40, beside=False)
    assert torch.equal(run(1, beside=True), whole)
    assert torch.equal(run(13, beside=True), whole)


@needs_compiler
def test_the_demo_model_in_int8_mostly_chooses_the_tokens_of_bfloat16() -> None:
    kernels = native_kernels()
    ids = _demo_ids(100)
    logits = [
        logits_of(load(DEMO_MODEL, torch.bfloat16, kernels, quant), ids, kernels, torch.bfloat16)
        for quant in (UNQUANTIZED, INT8)
    ]
    assert relative(logits[1], logits[0]) < 0.08
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean() > 0.8


@needs_compiler
def test_ranks_quantise_their_own_parts(tmp_path: Path) -> None:
    ids = _demo_ids(30)
    kernels = native_kernels()
    expected = logits_of(load(DEMO_MODEL, quant=UNQUANTIZED), ids)
    alone = relative(logits_of(load(DEMO_MODEL, kernels=kernels), ids, kernels), expected)
    [leader, follower] = on_ranks(
        2,
        tmp_path / "run",
        lambda group: logits_of(load(DEMO_MODEL, kernels=kernels, group=group), ids, kernels),
    )
    assert not len(follower), "logits are gathered to rank 0 alone"
    assert relative(leader, expected) < max(1.5 * alone, 0.05)


@needs_compiler
def test_gates_are_computed_with_their_products() -> None:
    ops = NativeOps(native_kernels())
    model = load(DEMO_MODEL, torch.bfloat16)
    model.bind(ops)
    assert ops.table.counts["gate, in linear", BY_CPP, ""] == len(model.model.layers)
    assert not any(operation == "gate" for operation, *_ in ops.table.counts)


def test_a_quantised_layer_holds_one_byte_a_weight_and_a_scale_an_output() -> None:
    plain, quantised = load(DEMO_MODEL, torch.bfloat16, quant=UNQUANTIZED), load(DEMO_MODEL, torch.bfloat16)
    for name, layer in quantised.named_modules():
        if isinstance(layer, StoredWeight):
            wide = plain.get_submodule(name)
            assert isinstance(wide, StoredWeight)
            before = wide.weight
            assert layer.weight.nbytes == before.nbytes // 2
            assert layer.weight.untyped_storage().nbytes() == layer.weight.nbytes
            assert layer.weight_scale is not None
            assert layer.weight_scale.shape == (before.shape[0], 1)
    head = quantised.lm_head.weight
    assert head.dtype is torch.int8
    assert head.row_scale is not None
    assert head.row_scale.shape == (head.shape[0],)
    assert quantised.model.embed_tokens.weight is head


def test_random_weights_are_quantised_too() -> None:
    config = ModelConfig.from_path(DEMO_MODEL)
    model = load_model(DEMO_MODEL, config, torch.float32, "cpu", "dummy", quant=INT8)
    layers = [module for module in model.modules() if isinstance(module, StoredWeight)]
    assert all(layer.weight.dtype is torch.int8 for layer in layers)
    assert logits_of(model, [1, 2, 3]).isfinite().all()
