"""Adapter directories for tests, in the form that the PEFT library writes, with random numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Matrix = npt.NDArray[np.float32]


def write_adapter(
    path: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 8,
    ranks: Mapping[str, int] | None = None,
    seed: int = 0,
    size: float = 0.1,
    **config: Any,
) -> dict[str, tuple[Matrix, Matrix]]:
    """Write an adapter of modules with these (outputs, inputs) and return its A and B by module. ranks: of
    modules with one of their own. config: keys of adapter_config.json.
    """
    rng = np.random.default_rng(seed)
    factors: dict[str, tuple[Matrix, Matrix]] = {}
    for name, (num_outputs, num_inputs) in shapes.items():
        own = (ranks or {}).get(name, rank)
        a = rng.standard_normal((own, num_inputs), np.float32) / np.float32(num_inputs**0.5)
        b = rng.standard_normal((num_outputs, own), np.float32) * np.float32(size)
        factors[name] = a, b
    path.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    write_config(path, **{"r": rank, "target_modules": targets, **config})
    tensors = {
        f"base_model.model.{name}.lora_{side}.weight": factor
        for name, both in factors.items()
        for side, factor in zip("AB", both, strict=True)
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return factors


def write_config(path: Path, **config: Any) -> None:
    """Write adapter_config.json; keys that are not given are those of a plain LoRA."""
    plain: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "bias": "none",
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
    }
    (path / "adapter_config.json").write_text(json.dumps(plain | config))
