"""Files of multimodal checkpoints: what in them is not of the decoder, and which head it has."""

from __future__ import annotations

import logging
import math
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from model_worker.loading.safetensors_file import Rename, open_safetensors
from model_worker.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_ROWS_AT_A_TIME = 1024


def log_what_is_left_out(files: list[Path], rename: Rename) -> None:
    """Say which modules stay in the files, and how large they are there."""
    num_bytes: dict[str, int] = {}
    for path in files:
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if rename(name) is None:
                    module = name.removeprefix("model.").partition(".")[0]
                    num_bytes[module] = num_bytes.get(module, 0) + _num_bytes(file.get_slice(name))
    if num_bytes:
        logger.info(
            "served is the text part of this checkpoint; not loaded: %s",
            ", ".join(f"{module} ({size / 1e6:,.1f} MB)" for module, size in num_bytes.items()),
        )


def _num_bytes(tensor: Any) -> int:
    """Size of a tensor in a file, whose dtype is named like F32, BF16 or F8_E4M3."""
    bits = re.search(r"\d+", tensor.get_dtype())
    num_elements: int = math.prod(tensor.get_shape())
    return num_elements * (int(bits[0]) // 8 if bits else 1)


def has_own_head(files: list[Path], rename: Rename, spec: ModelSpec) -> bool:
    """Return whether the files have a head that is not the embedding once more.

    What config.json says of that is not to be relied on here: one generation of the library asks
    text_config, the next one the whole, where it is often left out.
    """
    head, embedding = (
        spec.checkpoint_name(f"{module}.weight") for module in ("lm_head", "model.embed_tokens")
    )
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in files:
            file = stack.enter_context(open_safetensors(path, rename))
            found.update((name, file.get_slice(name)) for name in {head, embedding}.intersection(file.keys()))
        if len(found) < 2:
            return False
        if found[head].get_shape() != found[embedding].get_shape():
            return True
        num_rows = found[head].get_shape()[0]
        parts = (slice(start, start + _ROWS_AT_A_TIME) for start in range(0, num_rows, _ROWS_AT_A_TIME))
        return any(not found[head][part].equal(found[embedding][part]) for part in parts)
