"""Adapter directories: what is read of them, and what is refused by its name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.base.errors import InvalidRequest
from runtime.checkpoint.adapters.lora_config import AdapterConfig, read_adapter
from tests.harness.adapters import write_adapter, write_config
from tests.harness.cases import for_each

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
SHAPES = {Q: (32, 16), V: (8, 16)}


def read(path: Path, max_rank: int = 64) -> AdapterConfig:
    return read_adapter(path, max_rank)


def change_config(path: Path, **keys: Any) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | keys))


def refusal(path: Path, max_rank: int = 64) -> str:
    with pytest.raises(InvalidRequest) as refused:
        read(path, max_rank)
    assert refused.value.code == "invalid_adapter"
    assert str(path) in refused.value.message
    return refused.value.message


def test_modules_have_names_shapes_and_scaling(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES, rank=4, lora_alpha=6)
    first, second = read(tmp_path).modules
    assert (first.name, first.rank, first.scaling) == (Q, 4, 1.5)
    assert (first.in_features, first.out_features) == (16, 32)
    assert (second.name, second.out_features) == (V, 8)


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES, rank=16, lora_alpha=6, use_rslora=True)
    assert {module.scaling for module in read(tmp_path).modules} == {1.5}


def test_patterns_give_modules_ranks_and_scaling_of_their_own(tmp_path: Path) -> None:
    of_one = r"layers\.1\.self_attn\.v_proj"
    patterns: dict[str, Any] = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {of_one: 8.0}}
    write_adapter(tmp_path, SHAPES, rank=4, ranks={Q: 2}, lora_alpha=6, **patterns)
    first, second = read(tmp_path).modules
    assert (first.rank, first.scaling) == (2, 3.0)
    assert (second.rank, second.scaling) == (4, 2.0)
    assert read(tmp_path).rank == 4


@pytest.mark.parametrize(
    "targets", ["all-linear", r".*\.self_attn\.(q|v)_proj", ["self_attn.q_proj", "v_proj"]]
)
def test_targets_are_a_list_an_expression_or_all(tmp_path: Path, targets: Any) -> None:
    write_adapter(tmp_path, SHAPES)
    change_config(tmp_path, target_modules=targets)
    assert len(read(tmp_path).modules) == 2


def test_layers_to_transform(tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: SHAPES[Q]}, layers_to_transform=0)
    assert read(tmp_path).targets.names(Q)
    assert not read(tmp_path).targets.names(Q.replace("0", "1"))
    change_config(tmp_path, layers_to_transform=[1])
    assert "target_modules" in refusal(tmp_path)


def test_another_version_has_other_files(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES)
    first = read(tmp_path).version
    assert read(tmp_path).version == first
    change_config(tmp_path, lora_alpha=32)
    second = read(tmp_path).version
    write_adapter(tmp_path, SHAPES, seed=1, lora_alpha=32)
    assert len({first, second, read(tmp_path).version}) == 3


@for_each(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("trainable_token_indices", [1]),
        ("layer_replication", [[0, 1]]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("init_lora_weights", "pissa_niter_16"),
        ("peft_type", "ADALORA"),
        ("a_key_of_next_year", 1),
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", "8"),
        ("target_modules", "(q_proj"),
        ("target_modules", ["k_proj"]),
        ("rank_pattern", {"(": 4}),
        ("alpha_pattern", {"q_proj": "4"}),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(tmp_path: Path, key: str, value: Any) -> None:
    write_adapter(tmp_path, SHAPES)
    change_config(tmp_path, **{key: value})
    assert key in refusal(tmp_path)


def test_a_rank_above_the_maximum_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES, rank=16)
    assert "--max-lora-rank 8" in refusal(tmp_path, max_rank=8)
    assert read(tmp_path, max_rank=16).rank == 16


@for_each(
    ("name", "reason"),
    [
        ("lm_head.lora_A.weight", "lm_head"),
        ("model.embed_tokens.lora_embedding_A", "embedding"),
        ("model.layers.0.mlp.experts.1.w1.lora_A.weight", "experts"),
        (f"{Q}.lora_magnitude_vector", "DoRA"),
        (f"{Q}.lora_B.bias", "lora_A and lora_B"),
        ("model.layers.0.self_attn.k_proj.lora_A.weight", "not name modules"),
        (f"{Q}.lora_A.weight", "lacks lora_B"),
    ],
)
def test_tensors_that_are_no_part_of_a_linear_adapter_are_refused(
    tmp_path: Path, name: str, reason: str
) -> None:
    write_config(tmp_path, r=8, target_modules=["q_proj"])
    save_file(
        {f"base_model.model.{name}": np.zeros((8, 16), np.float32)}, tmp_path / "adapter_model.safetensors"
    )
    assert reason in refusal(tmp_path)


def test_shapes_that_are_not_of_the_rank_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES, rank=8, ranks={V: 4})
    assert "not of rank 8" in refusal(tmp_path)


def test_other_numbers_than_floats_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, r=8, target_modules=["q_proj"])
    tensors = {
        f"base_model.model.{Q}.lora_{side}.weight": np.zeros(shape, np.int8)
        for side, shape in (("A", (8, 16)), ("B", (32, 8)))
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert "I8" in refusal(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "none")
    assert "adapter_config.json" in refusal(tmp_path)
    write_adapter(tmp_path, SHAPES)
    weights = tmp_path / "adapter_model.safetensors"
    weights.rename(tmp_path / "adapter_model.bin")
    assert "pickle" in refusal(tmp_path)
    (tmp_path / "adapter_model.bin").unlink()
    assert "no adapter_model.safetensors" in refusal(tmp_path)


@for_each("text", ["", "{", "[]", "null", '{"r": 8}', '{"peft_type": "LORA"}', "\xff"])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_config.json").write_bytes(text.encode("latin-1"))
    refusal(tmp_path)


def test_a_config_without_end_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_config.json").write_text(" " * (1 << 20) + "{}")
    assert "larger than" in refusal(tmp_path)


def header_of(tensors: dict[str, Any]) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header


def test_headers_that_lie_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES)
    weights = tmp_path / "adapter_model.safetensors"
    data = weights.read_bytes()
    name = f"base_model.model.{Q}.lora_A.weight"
    large = {name: {"dtype": "F32", "shape": [8, 10 << 30], "data_offsets": [0, 320 << 30]}}
    other = {name: {"dtype": "F32", "shape": [8, 16], "data_offsets": [0, 4]}}
    for content, reason in (
        (data[:-1], "cut short"),
        (data[:9], "cut short"),
        (data + b"\0", "longer than its header"),
        (struct.pack("<Q", 10 << 30) + data[8:], "no safetensors file"),
        (header_of(large) + bytes(64), "cut short"),
        (header_of(other) + bytes(4), "lies"),
        (struct.pack("<Q", 2) + b"[]", "header"),
    ):
        weights.write_bytes(content)
        assert reason in refusal(tmp_path)


@for_each(
    ("pattern", "reason"),
    [
        ("q_proj{4294967296}", "the repetition number is too large"),
        ("(" * 500 + "x" + ")" * 500, "nested too deep"),
    ],
)
@for_each("key", ["target_modules", "rank_pattern"])
def test_patterns_beyond_what_can_be_compiled_are_refused(
    tmp_path: Path, key: str, pattern: str, reason: str
) -> None:
    """They raised errors of their own, which ended the tokenizer that an upload had come to."""
    write_adapter(tmp_path, SHAPES)
    change_config(tmp_path, **{key: pattern if key == "target_modules" else {pattern: 8}})
    assert reason in refusal(tmp_path)


@for_each("depth", [200, 480, 900, 20_000])
def test_values_that_are_nested_too_deep_are_refused(tmp_path: Path, depth: int) -> None:
    write_adapter(tmp_path, SHAPES)
    config = (tmp_path / "adapter_config.json").read_bytes().rstrip()
    nested = b"[" * depth + b"1" + b"]" * depth
    (tmp_path / "adapter_config.json").write_bytes(config[:-1] + b', "new": ' + nested + b"}")
    refusal(tmp_path)


def test_a_header_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES)
    header = b'{"a": {"x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}}"
    (tmp_path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "cannot be read" in refusal(tmp_path)
