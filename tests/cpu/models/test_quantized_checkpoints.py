"""Checkpoints that are quantised: what is loaded as it is, what is dequantised, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_worker.distributed.group import SOLO, RankGroup
from model_worker.kernels.fp8_rows import FP8, LARGEST
from model_worker.kernels.int8_linear import quantize_rows
from model_worker.layers.linear import Linear
from model_worker.loading.loader import load_model
from model_worker.models.transformer import CausalLM
from model_worker.ops.native_ops import NativeOps
from model_worker.quant.base import QuantMethod
from model_worker.quant.fp8 import Fp8
from model_worker.quant.int8 import Int8
from model_worker.quant.selection import select_quant_method
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.base.errors import ModelError
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.quantization import CheckpointQuantization
from runtime.settings.config import DEMO_MODEL
from tests.harness.models.adapted import ADAPTERS, adapted, merged, save_peft_adapter
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.paged_forward import PagedForward
from tests.harness.models.plans import save_tiny_llama
from tests.harness.models.rank_threads import on_ranks
from tests.harness.models.reference import reference_logits

IDS = list(range(50, 90))
BLOCK = 48  # divides neither 384 nor 1024 nor the heads of a rank evenly everywhere
PLAIN = ("model.layers.1.mlp.down_proj", "model.layers.2.self_attn.k_proj")  # not quantised in the files
# Of logits in float32, over their largest; the scales are multiplied in another order.
TOLERANCE = 1e-5

Quantized = dict[str, Tensor]


def _is_quantised(name: str) -> bool:
    return "_proj.weight" in name and name.removesuffix(".weight") not in PLAIN


def _fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-LARGEST, LARGEST).to(FP8)


def _fp8_tensor(name: str, weight: Tensor) -> tuple[Quantized, Tensor]:
    scale = weight.abs().max() / LARGEST
    stored = _fp8(weight, scale)
    base = name.removesuffix("weight")
    return {name: stored, f"{base}weight_scale": scale, f"{base}input_scale": torch.ones(())}, (
        stored.float() * scale
    )


def _fp8_channel(name: str, weight: Tensor) -> tuple[Quantized, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    stored = _fp8(weight, scale)
    return {name: stored, f"{name}_scale": scale}, stored.float() * scale


def _fp8_block(name: str, weight: Tensor) -> tuple[Quantized, Tensor]:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scale = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            tile = weight[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scale[i, j] = tile.abs().max() / LARGEST
    full = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)
    full = full[:, : weight.shape[1]]
    stored = _fp8(weight, full)
    return {name: stored, f"{name}_scale_inv": scale}, stored.float() * full


def _int8_channel(name: str, weight: Tensor) -> tuple[Quantized, Tensor]:
    stored, scale = quantize_rows(weight)
    scale = scale.unsqueeze(1) * 1.03  # of a calibration: not what quantising the result again would give
    return {name: stored, f"{name}_scale": scale}, stored.float() * scale


def _groups(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    args = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "ignore": ["lm_head", *PLAIN],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": args | {"strategy": strategy, "dynamic": False} | more,
                "input_activations": args | {"strategy": "token", "dynamic": True},
            }
        },
    }


FORMATS = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_tensor),
    "fp8_block": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
        _fp8_block,
    ),
    "compressed_fp8_tensor": (_groups("float", "tensor"), _fp8_tensor),
    "compressed_fp8_channel": (_groups("float", "channel"), _fp8_channel),
    "compressed_int8_channel": (_groups("int", "channel"), _int8_channel),
}


def _write(path: Path, form: str) -> dict[str, Tensor]:
    """The demo model in that format, weights and scales in different files; what its weights stand for."""
    entry, quantise = FORMATS[form]
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    files: list[dict[str, Tensor]] = [{}, {}]
    meant = {}
    for name, tensor in load_file(DEMO_MODEL / "model.safetensors").items():
        meant[name] = tensor.float()
        if not _is_quantised(name):
            files[0][name] = tensor
            continue
        stored, meant[name] = quantise(name, tensor.float())
        for own, value in stored.items():
            files[own != name][own] = value.contiguous()
    save_file(files[0], path / "b.safetensors")
    save_file(files[1], path / "a.safetensors")
    return meant


def _load(path: Path, quant: QuantMethod, **options: Any) -> CausalLM:
    return load_model(path, ModelConfig.from_path(path), torch.float32, "cpu", quant=quant, **options)


def _logits(model: CausalLM) -> Tensor:
    return PagedForward(model, 16).step([(1, IDS)])


def _apart(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("form", FORMATS)
def test_dequantised_weights_give_the_logits_of_transformers(form: str, tmp_path: Path) -> None:
    expected = reference_logits(_reference(_write(tmp_path, form)), IDS)
    got = _logits(_load(tmp_path, UNQUANTIZED))
    assert _apart(got, expected) < TOLERANCE
    assert _apart(_logits(_load(DEMO_MODEL, UNQUANTIZED)), expected) > 1e-3


def _reference(meant: dict[str, Tensor]) -> PreTrainedModel:
    """Return transformers' model with these weights."""
    hf: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        DEMO_MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    missing, unexpected = hf.load_state_dict(meant, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return hf


@needs_compiler
@pytest.mark.parametrize("form", ["fp8", "fp8_block", "compressed_int8_channel"])
def test_an_adapter_over_eight_bits_is_as_near_as_its_base(form: str, tmp_path: Path) -> None:
    """Beside an adapter merged into what the weights stand for; int8 within the margin that it has alone."""
    folder = tmp_path / "model"
    folder.mkdir()
    hf = _reference(_write(folder, form))
    save_peft_adapter(hf, ADAPTERS["rank_16_rslora"], tmp_path / "adapter")
    expected = reference_logits(merged(hf, tmp_path / "adapter"), IDS)
    assert _apart(reference_logits(hf, IDS), expected) > 0.1, "an adapter that changes nothing"
    is_int8 = form == "compressed_int8_channel"
    ops = NativeOps(native_kernels())
    with adapted(folder, ops, quant=Int8(stored=True) if is_int8 else UNQUANTIZED) as served:
        served.load({1: tmp_path / "adapter"})
        served.assign([-1, 1])
        got = PagedForward(served.model, 16, backend=ops.attention).step([(1, IDS)])
    if is_int8:
        assert 0 < (got - expected).norm() < 0.08 * expected.norm()
    else:
        assert _apart(got, expected) < TOLERANCE


@needs_compiler
@pytest.mark.parametrize("form", FORMATS)
def test_each_rank_dequantises_its_own_part(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    _write(folder, form)
    expected = _logits(_load(folder, UNQUANTIZED))

    def run(group: RankGroup) -> Tensor:
        return _logits(_load(folder, UNQUANTIZED, group=group))

    leader, _ = on_ranks(2, tmp_path / "run", run)  # logits are gathered to rank 0 alone
    assert _apart(leader, expected) < TOLERANCE


def test_int8_weights_and_scales_are_loaded_as_they_are(tmp_path: Path) -> None:
    """Layers of which a part is not quantised are computed in the model's dtype."""
    meant = _write(tmp_path, "compressed_int8_channel")
    method = select_quant_method("auto", ModelConfig.from_path(tmp_path).quantization, "cpu")
    model = _load(tmp_path, method)
    tensors = load_file(tmp_path / "b.safetensors") | load_file(tmp_path / "a.safetensors")
    layer = model.get_submodule("model.layers.0.mlp.gate_up_proj")
    assert isinstance(layer, Linear)
    assert layer.weight.dtype is torch.int8
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    assert torch.equal(layer.weight, torch.cat([tensors[name] for name in names]))
    assert layer.weight_scale is not None
    assert torch.equal(layer.weight_scale, torch.cat([tensors[f"{name}_scale"] for name in names]))
    down_proj, qkv_proj = map(
        model.get_submodule, ("model.layers.1.mlp.down_proj", "model.layers.2.self_attn.qkv_proj")
    )
    assert isinstance(down_proj, Linear)
    assert isinstance(qkv_proj, Linear)
    assert down_proj.weight.dtype is qkv_proj.weight.dtype is torch.float32
    k_proj = meant["model.layers.2.self_attn.k_proj.weight"]
    assert (qkv_proj.weight.unsqueeze(0).eq(k_proj[:1].unsqueeze(1)).all(-1)).any()


@needs_compiler
def test_an_int8_checkpoint_is_near_its_dequantised_weights_on_any_number_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    _write(folder, "compressed_int8_channel")
    expected = _logits(_load(folder, UNQUANTIZED))
    stored = Int8(stored=True)
    alone = _logits(_load(folder, stored))
    bound = 0.08 * expected.norm()
    assert 0 < (alone - expected).norm() < bound
    leader, _ = on_ranks(2, tmp_path / "run", lambda group: _logits(_load(folder, stored, group=group)))
    assert (leader - expected).norm() < bound


@needs_compiler
def test_a_rank_dequantises_what_no_product_of_eight_bits_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The layers have 48 features in and out, and 2 × 40 between them: not in sixteens where they are cut."""
    folder = tmp_path / "model"
    save_tiny_llama(folder)
    tensors = load_file(folder / "model.safetensors")
    stored = {name: tensor for name, tensor in tensors.items() if not _is_quantised(name)}
    for name in tensors.keys() - stored.keys():
        stored |= _fp8_channel(name, tensors[name])[0]
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS["fp8"][0]}))

    def narrow(group: RankGroup) -> dict[str, bool]:
        modules = _load(folder, Fp8(), group=group).model.layers[0].named_modules()
        return {name: each.weight.dtype is FP8 for name, each in modules if isinstance(each, Linear)}

    whole = dict.fromkeys(
        ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"), True
    )
    with caplog.at_level("INFO"):
        assert narrow(SOLO) == whole
        assert caplog.messages == []
        cut = whole | {"mlp.down_proj": False}
        assert on_ranks(2, tmp_path / "run", narrow) == [cut, cut]
    said = "dequantised as they are loaded, because of their sizes: 1 layers"  # the other one is plain
    assert caplog.messages == [said, said]


@pytest.mark.parametrize(
    ("requested", "device", "block", "reason"),
    [
        ("auto", "cuda", None, "to compute with them takes a GPU of compute capability 8.9 (Ada) or later"),
        ("auto", "cpu", None, "on this device (cpu) nothing computes with them"),
        ("auto", "cuda", (128, 128), "nothing computes with a scale for each block"),
        ("int8", "cuda", None, "int8 was asked for"),
    ],
)
def test_the_log_says_why_weights_are_dequantised(
    requested: str,
    device: str,
    block: tuple[int, int] | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a GPU before Ada, where `device` is one."""
    monkeypatch.setattr("model_worker.quant.selection.has_fp8", lambda: False)
    with caplog.at_level("INFO"):
        method = select_quant_method(requested, CheckpointQuantization("float8_e4m3fn", block), device)
    assert method.stored is None
    assert caplog.messages == [
        f"the checkpoint's float8_e4m3fn weights are dequantised as they are loaded: {reason}"
    ]


def test_the_method_follows_setting_checkpoint_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(requested: str, dtype: Any, device: str, block: Any = None) -> str:
        checkpoint = None if dtype is None else CheckpointQuantization(dtype, block)
        method = select_quant_method(requested, checkpoint, device)
        return f"{type(method).__name__} {method.stored}"

    assert stored("auto", None, "cpu") == "Unquantized None"
    assert stored("int8", None, "cpu") == "Int8 None"
    assert stored("auto", "int8", "cpu") == "Int8 torch.int8"
    assert stored("int8", "int8", "cpu") == "Int8 torch.int8"
    assert stored("auto", "int8", "cuda") == "Unquantized None"
    assert stored("auto", "float8_e4m3fn", "cpu") == "Unquantized None"
    assert stored("int8", "float8_e4m3fn", "cpu") == "Int8 None"
    assert stored("auto", "float8_e4m3fn", "cuda") == "Fp8 torch.float8_e4m3fn"
    assert stored("auto", "float8_e4m3fn", "cuda", (128, 128)) == "Unquantized None"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((8, 6), "Unquantized None"), ((8, 9), "Fp8 torch.float8_e4m3fn")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda known=capability: known)
        assert stored("auto", "float8_e4m3fn", "cuda") == expected


def _rewrite(path: Path, change: Any) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        tensors = load_file(path / file)
        change(tensors)
        save_file(tensors, path / file)


def test_missing_and_misshapen_scales_are_named(tmp_path: Path) -> None:
    _write(tmp_path, "compressed_int8_channel")
    name = "model.layers.3.mlp.up_proj.weight"
    _rewrite(tmp_path, lambda tensors: tensors.pop(f"{name}_scale", None))
    with pytest.raises(ModelError, match=f"{name} is quantised, but it has no weight_scale"):
        _load(tmp_path, Int8(stored=True))
    _rewrite(tmp_path, lambda tensors: tensors.update({f"{name}_scale": torch.ones(7, 1)}))
    with pytest.raises(ModelError, match=rf"scales of {name} \[.*\] have the shape \[7, 1\]"):
        _load(tmp_path, Int8(stored=True))


def test_a_tensor_of_an_unknown_kind_beside_a_weight_is_unexpected(tmp_path: Path) -> None:
    _write(tmp_path, "compressed_int8_channel")
    extra = "model.layers.0.mlp.up_proj.weight_zero_point"
    save_file({extra: torch.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(ModelError, match=f"unexpected: {extra}"):
        _load(tmp_path, Int8(stored=True))


def test_scales_in_a_checkpoint_that_says_nothing_of_them_are_unexpected(tmp_path: Path) -> None:
    _write(tmp_path, "compressed_int8_channel")
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    with pytest.raises(ModelError, match="weight_scale"):
        _load(tmp_path, UNQUANTIZED)
