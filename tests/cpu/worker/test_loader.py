"""The loader: which files and tensors it accepts, where they go, what it says of those that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model_worker.layers.linear import Linear
from model_worker.layers.weight import Piece
from model_worker.loading.loader import load_model
from model_worker.loading.tensor_names import checkpoint_targets
from model_worker.models.transformer import CausalLM
from model_worker.quant.base import QuantMethod
from model_worker.quant.fp8 import Fp8
from model_worker.quant.int8 import Int8
from runtime.base.errors import ModelError
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.weight_files import INDEX_FILE

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def _write_config(path: Path, **changes: object) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(_CONFIG | changes))
    return ModelConfig.from_path(path)


def _checkpoint(config: ModelConfig) -> dict[str, Tensor]:
    """Random tensors under the names that published Qwen2 checkpoints use."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (11, 8),
        "model.norm.weight": (8,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (11, 8)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}.weight": (8,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (8, 8),
            f"{layer}.self_attn.q_proj.bias": (8,),
            f"{layer}.self_attn.k_proj.weight": (4, 8),
            f"{layer}.self_attn.k_proj.bias": (4,),
            f"{layer}.self_attn.v_proj.weight": (4, 8),
            f"{layer}.self_attn.v_proj.bias": (4,),
            f"{layer}.self_attn.o_proj.weight": (8, 8),
            f"{layer}.mlp.gate_proj.weight": (12, 8),
            f"{layer}.mlp.up_proj.weight": (12, 8),
            f"{layer}.mlp.down_proj.weight": (8, 12),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _load(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(path, config, dtype, "cpu")


def memory_of(targets: dict[str, list[Piece]], name: str) -> Tensor:
    """Return what a tensor fills, of a model that is not cut."""
    [piece] = targets[name]
    assert piece.shape == piece.memory.shape
    return piece.memory


def test_packed_weights_hold_the_checkpoints_rows_in_order(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    tensors = _checkpoint(config)
    save_file(tensors, tmp_path / "model.safetensors")
    parameters = dict(_load(tmp_path, config).named_parameters())
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    for kind in ("weight", "bias"):
        packed = torch.cat([tensors[f"{attention}.{part}_proj.{kind}"] for part in "qkv"])
        assert torch.equal(parameters[f"{attention}.qkv_proj.{kind}"], packed)
    packed = torch.cat([tensors[f"{mlp}.gate_proj.weight"], tensors[f"{mlp}.up_proj.weight"]])
    assert torch.equal(parameters[f"{mlp}.gate_up_proj.weight"], packed)
    assert not any(parameter.requires_grad for parameter in parameters.values())


def test_every_target_receives_its_tensor_in_the_asked_dtype(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    tensors = _checkpoint(config)
    save_file(tensors, tmp_path / "model.safetensors")
    targets = checkpoint_targets(_load(tmp_path, config, torch.bfloat16))
    assert targets.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(memory_of(targets, name), tensor.bfloat16())


def test_shards_are_found_through_the_index_and_other_files_left_alone(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    tensors = _checkpoint(config)
    weight_map = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, tmp_path / file)
    save_file({"adapter": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    targets = checkpoint_targets(_load(tmp_path, config))
    assert all(torch.equal(memory_of(targets, name), tensor) for name, tensor in tensors.items())


def test_shards_without_an_index_are_all_read_but_not_the_consolidated_copy(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    tensors = list(_checkpoint(config).items())
    save_file(dict(tensors[:9]), tmp_path / "a.safetensors")
    save_file(dict(tensors[9:]), tmp_path / "b.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    targets = checkpoint_targets(_load(tmp_path, config))
    assert all(torch.equal(memory_of(targets, name), tensor) for name, tensor in tensors)


@pytest.mark.parametrize("weight_map", [{}, {"model.norm.weight": "model-00001-of-00002.safetensors"}])
def test_an_index_of_an_earlier_save_is_passed_over(weight_map: dict[str, str], tmp_path: Path) -> None:
    """transformers removes the shards, and leaves their index."""
    config = _write_config(tmp_path)
    tensors = _checkpoint(config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    targets = checkpoint_targets(_load(tmp_path, config))
    assert all(torch.equal(memory_of(targets, name), tensor) for name, tensor in tensors.items())


def test_what_stands_beside_the_models_one_file_is_left_alone(tmp_path: Path) -> None:
    """Averages of the weights, which have the same names; transformers reads the one file, too."""
    config = _write_config(tmp_path)
    tensors = _checkpoint(config)
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({name: torch.zeros_like(each) for name, each in tensors.items()}, tmp_path / "ema.safetensors")
    targets = checkpoint_targets(_load(tmp_path, config))
    assert all(torch.equal(memory_of(targets, name), tensor) for name, tensor in tensors.items())


def test_tied_embeddings_share_memory_and_ignore_a_stored_head(tmp_path: Path) -> None:
    config = _write_config(tmp_path, tie_word_embeddings=True)
    tensors = _checkpoint(config)
    save_file({**tensors, "lm_head.weight": torch.zeros(11, 8)}, tmp_path / "model.safetensors")
    model = _load(tmp_path, config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    stored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}
    save_file({**_checkpoint(config), **stored}, tmp_path / "model.safetensors")
    _load(tmp_path, config)


def test_missing_unexpected_and_misshapen_weights_are_listed_together(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    tensors = _checkpoint(config)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(12, 8)
    tensors["model.norm.weight"] = torch.zeros(9)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        _load(tmp_path, config)
    message = str(caught.value)
    assert "missing: model.layers.1.self_attn.k_proj.bias;" in message
    assert "unexpected: model.layers.2.mlp.up_proj.weight;" in message
    assert "wrong shape: model.norm.weight [9] instead of [8]" in message


def test_a_long_list_of_faults_is_cut(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    save_file({"model.norm.weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"and 18 more\.$"):
        _load(tmp_path, config)


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        _load(tmp_path, config)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(_checkpoint(config), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        _load(tmp_path, config)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            '{"weight_map": {"a": "model.safetensors", "b": "gone.safetensors"}}',
            "lacks files that its index names: gone.safetensors",
        ),
        ('{"weight_map": {"a": "../model.safetensors"}}', "outside the model directory"),
        ('{"weight_map": [', "cannot be read"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    config = _write_config(tmp_path)
    save_file(_checkpoint(config), tmp_path / "model.safetensors")
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(ModelError, match=message):
        _load(tmp_path, config)


def test_progress_counts_every_tensor_once(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    tensors = _checkpoint(config)
    save_file(tensors, tmp_path / "model.safetensors")
    calls: list[tuple[int, int]] = []
    load_model(
        tmp_path, config, torch.float32, "cpu", progress=lambda done, total: calls.append((done, total))
    )
    assert calls == [(done, len(tensors)) for done in range(1, len(tensors) + 1)]


def test_dummy_weights_need_no_file_and_are_the_same_every_time(tmp_path: Path) -> None:
    config = _write_config(tmp_path)
    first = dict(load_model(tmp_path, config, torch.float32, "cpu", "dummy").named_parameters())
    second = dict(load_model(tmp_path, config, torch.float32, "cpu", "dummy").named_parameters())
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert weight.isfinite().all()
    assert first["model.norm.weight"].eq(1.0).all()
    layers = [first[f"model.layers.{i}.self_attn.qkv_proj.weight"] for i in range(2)]
    assert not torch.equal(*layers)
    assert all(0.01 < float(layer.std()) < 0.03 for layer in layers)


@pytest.mark.parametrize("quant", [Fp8(), Int8(stored=True)])
def test_dummy_weights_may_be_quantised(quant: QuantMethod, tmp_path: Path) -> None:
    model = load_model(tmp_path, _write_config(tmp_path), torch.float32, "cpu", "dummy", quant=quant)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, Linear)
    assert layer.weight.dtype is quant.stored
    assert layer.weight_scale is not None
    assert 0.01 < float((layer.weight.float() * layer.weight_scale).std()) < 0.03


_EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}


def test_each_experts_tensors_go_to_its_place_in_the_stack(tmp_path: Path) -> None:
    """The checkpoint has names of its own for them."""
    config = _write_config(tmp_path, **_EXPERTS)
    wanted = checkpoint_targets(load_model(tmp_path, config, torch.float32, "cpu", "dummy"))
    tensors = {name: torch.randn(pieces[0].shape) for name, pieces in wanted.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    experts = _load(tmp_path, config).get_submodule("model.layers.0.mlp.experts")
    stacked = dict(experts.named_parameters())
    for expert in range(3):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
        gate, up = tensors[f"{prefix}.w1.weight"], tensors[f"{prefix}.w3.weight"]
        assert torch.equal(stacked["gate_up_proj.weight"][expert], torch.cat((gate, up)))
        assert torch.equal(stacked["down_proj.weight"][expert], tensors[f"{prefix}.w2.weight"])


def test_a_missing_expert_is_named_as_the_checkpoint_names_it(tmp_path: Path) -> None:
    config = _write_config(tmp_path, **_EXPERTS)
    wanted = checkpoint_targets(load_model(tmp_path, config, torch.float32, "cpu", "dummy"))
    tensors = {name: torch.zeros(pieces[0].shape) for name, pieces in wanted.items()}
    lost = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"missing: {lost}"):
        _load(tmp_path, config)


def test_values_are_changed_once_and_only_after_loading(tmp_path: Path) -> None:
    """A norm whose scale is one plus the weight holds the scale, in float32; dummy weights are scales too."""
    config = _write_config(tmp_path, architectures=["Gemma2ForCausalLM"], head_dim=4)
    dummy = load_model(tmp_path, config, torch.bfloat16, "cpu", "dummy")
    wanted = checkpoint_targets(dummy)
    tensors = {name: torch.full(pieces[0].shape, 0.25) for name, pieces in wanted.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    norm = dict(_load(tmp_path, config, torch.bfloat16).named_parameters())["model.norm.weight"]
    assert norm.dtype is torch.float32
    assert norm.eq(1.25).all()
    assert dict(dummy.named_parameters())["model.norm.weight"].eq(1.0).all()
