"""CheckpointKVScales: scales of keys and values that a checkpoint has for a float8 KV cache. Knows files and
tensor names.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

from torch import Tensor

from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.loading.safetensors_file import Rename, open_safetensors
from runtime.base.errors import ModelError

logger = logging.getLogger(__name__)

# Endings of names after a layer's attention, as written by compressed-tensors, ModelOpt, AutoFP8 and its
# predecessor, and by tools that fuse projections. The last one is for both keys and values.
K_SCALES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "qkv_proj.k_scale", "kv_scale")
V_SCALES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "qkv_proj.v_scale", "kv_scale")
# compressed-tensors writes these although they are zero.
ZERO_POINTS = ("k_zero_point", "v_zero_point")
# Queries are not quantised.
UNUSED = ("q_scale", "q_zero_point")


class CheckpointKVScales:
    """KV scales in a checkpoint's files. They are read at once, since they are small."""

    def __init__(self, files: list[Path], modules: list[str], rename: Rename | None = None) -> None:
        """modules: names of the layers' attention modules in the checkpoint, in order. Raises ModelError if a
        file cannot be read, a scale has several values, or a zero point is not zero.
        """
        self._modules = modules
        self._found: dict[str, float] = {}
        self._unused = _names(modules, UNUSED)
        wanted = _names(modules, (*K_SCALES, *V_SCALES, *ZERO_POINTS))
        for path in files:
            with open_safetensors(path, rename) as file:
                for name in wanted.intersection(file.keys()):
                    self._note(name, file.get_tensor(name))

    def _note(self, name: str, value: Tensor) -> None:
        if name.endswith(ZERO_POINTS):
            if value.any():
                raise ModelError(f"The checkpoint's {name} is not zero: only symmetric scales are read.")
            self._unused.add(name)
            return
        if value.numel() != 1:
            raise ModelError(
                f"The checkpoint's {name} has the shape {list(value.shape)}: only one scale for all heads of "
                "a layer is read."
            )
        self._found[name] = float(value)

    def __contains__(self, name: str) -> bool:
        """Return True if the tensor of that name is one of the scales, or belongs to them."""
        return name in self._found or name in self._unused

    def log_unused(self) -> None:
        if self._found:
            logger.info(
                "the checkpoint's scales of keys and values are not used: they are for a KV cache of float8 "
                "(--kv-cache-dtype fp8_e4m3)"
            )

    def by_layer(self) -> list[KVScale]:
        """Return the scales of each layer; 1 if the checkpoint has none. Raises ModelError if some are
        missing or invalid.
        """
        if not self._found:
            logger.info("the checkpoint has no scales of keys and values: float8 keeps them as they are")
            return [UNSCALED] * len(self._modules)
        scales = [KVScale(self._scale(each, K_SCALES), self._scale(each, V_SCALES)) for each in self._modules]
        keys, values = zip(*scales, strict=True)
        logger.info(
            "float8 keeps keys divided by the checkpoint's scales of %.3g to %.3g, values by %.3g to %.3g",
            min(keys),
            max(keys),
            min(values),
            max(values),
        )
        return scales

    def _scale(self, module: str, names: tuple[str, ...]) -> float:
        for name in names:
            if (scale := self._found.get(f"{module}.{name}")) is not None:
                if not 0.0 < scale < math.inf:
                    raise _unusable(f"{module}.{name} is {scale}")
                return scale
        raise _unusable(f"other layers have scales of keys and values, but there is no {module}.{names[0]}")


def _names(modules: list[str], kinds: tuple[str, ...]) -> set[str]:
    return {f"{module}.{kind}" for module in modules for kind in kinds}


def _unusable(why: str) -> ModelError:
    return ModelError(
        f"The checkpoint's scales of keys and values cannot be used: {why}. Leave out --kv-cache-dtype, or "
        "calibrate the checkpoint anew."
    )
