"""Scales of keys and values in checkpoints: under which names, who takes them, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model_worker.distributed.group import SOLO, RankGroup
from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.loading.loader import load_model
from model_worker.models.attention import SelfAttention
from runtime.base.errors import ModelError
from runtime.checkpoint.model_config import ModelConfig
from tests.harness.models.native import needs_compiler
from tests.harness.models.plans import save_tiny_llama
from tests.harness.models.rank_threads import on_ranks

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
SCALES = [KVScale(0.5, 3.0), KVScale(0.25, 1e-3)]


def _save_model(path: Path) -> None:
    """Save a tiny model in shards without an index, to which others may be added."""
    save_tiny_llama(path)
    (path / "model.safetensors").rename(path / "part.safetensors")


def _write(path: Path, names: tuple[str, str], scales: dict[str, Tensor] | None = None) -> None:
    """A model of two layers whose attention has SCALES under those names, but for `scales`."""
    _save_model(path)
    config = json.loads((path / "config.json").read_text())
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    stored = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([value], dtype=torch.bfloat16)
        for layer, scale in enumerate(SCALES)
        for name, value in zip(names, scale, strict=True)
    }
    save_file(stored | (scales or {}), path / "scales.safetensors")


def _scales(path: Path, group: RankGroup = SOLO, *, used: bool = True) -> list[KVScale]:
    config = ModelConfig.from_path(path)
    model = load_model(path, config, torch.float32, "cpu", group=group, use_kv_scales=used)
    return [each.layer.kv_scale for each in model.modules() if isinstance(each, SelfAttention)]


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ],
)
def test_scales_are_found_by_the_names_that_tools_give_them(
    names: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, names)
    with caplog.at_level("INFO"):
        got = torch.tensor(_scales(tmp_path))
    assert caplog.messages == [
        "float8 keeps keys divided by the checkpoint's scales of 0.25 to 0.5, values by 0.000999 to 3"
    ]
    torch.testing.assert_close(got, torch.tensor(SCALES), atol=0.0, rtol=2**-8)  # as the file's bfloat16


def test_one_scale_may_stand_for_keys_and_values(tmp_path: Path) -> None:
    _write(tmp_path, ("kv_scale", "kv_scale"))
    assert [scale.key for scale in _scales(tmp_path)] == [scale.value for scale in _scales(tmp_path)]


def test_scales_are_left_alone_where_the_cache_has_no_eight_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even such as could not be used."""
    _write(tmp_path, ("k_scale", "v_scale"), {"model.layers.1.self_attn.v_scale": torch.zeros(1)})
    with caplog.at_level("INFO"):
        assert _scales(tmp_path, used=False) == [UNSCALED, UNSCALED]
    assert caplog.messages == [
        "the checkpoint's scales of keys and values are not used: they are for a KV cache of float8 "
        "(--kv-cache-dtype fp8_e4m3)"
    ]


def test_a_checkpoint_without_scales_has_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_llama(tmp_path)
    with caplog.at_level("INFO"):
        assert _scales(tmp_path) == [UNSCALED, UNSCALED]
    assert caplog.messages == [
        "the checkpoint has no scales of keys and values: float8 keeps them as they are"
    ]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.zeros(1), r"v_scale is 0\.0"),
        (torch.tensor(-1.0), r"v_scale is -1\.0"),
        (torch.tensor(torch.nan), "v_scale is nan"),
        (torch.ones(2, 1, 1), r"v_scale has the shape \[2, 1, 1\]: only one scale for all heads"),
    ],
)
def test_what_is_no_scale_is_refused_by_its_name(value: Tensor, says: str, tmp_path: Path) -> None:
    _write(tmp_path, ("k_scale", "v_scale"), {"model.layers.1.self_attn.v_scale": value})
    with pytest.raises(ModelError, match=rf"model\.layers\.1\.self_attn\.{says}"):
        _scales(tmp_path)


def test_missing_scales_are_named(tmp_path: Path) -> None:
    _save_model(tmp_path)
    save_file({"model.layers.0.self_attn.k_scale": torch.ones(1)}, tmp_path / "scales.safetensors")
    with pytest.raises(
        ModelError, match=r"there is no model\.layers\.0\.self_attn\.v_scale.*--kv-cache-dtype"
    ):
        _scales(tmp_path)


def test_queries_have_no_scale_and_zero_points_are_zero(tmp_path: Path) -> None:
    layer = "model.layers.1.self_attn"
    beside = dict.fromkeys(("q_zero_point", "k_zero_point", "v_zero_point"), 0.0) | {"q_scale": 0.1}
    tensors = {f"{layer}.{name}": torch.tensor([value]) for name, value in beside.items()}
    _write(tmp_path, ("k_scale", "v_scale"), tensors)
    assert _scales(tmp_path)[1].key == SCALES[1].key
    save_file({f"{layer}.v_zero_point": torch.ones(1)}, tmp_path / "zero.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.v_zero_point is not zero"):
        _scales(tmp_path)


def test_another_tensor_beside_the_scales_is_unexpected(tmp_path: Path) -> None:
    _write(tmp_path, ("k_scale", "v_scale"), {"model.layers.1.self_attn.prob_scale": torch.ones(1)})
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.1\.self_attn\.prob_scale"):
        _scales(tmp_path)


@needs_compiler
def test_each_rank_takes_the_same_scales(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    _write(folder, ("k_scale", "v_scale"))
    alone = _scales(folder)
    assert on_ranks(2, tmp_path / "run", lambda group: _scales(folder, group)) == [alone, alone]
