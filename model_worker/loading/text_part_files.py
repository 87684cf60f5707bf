"""Files of multimodal checkpoints: the tensors in them that do not belong to the decoder, and the head that
they have.
"""

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
    """Log which modules are not loaded, and their size in the files."""
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
    """Return the size of a tensor in a file, whose dtype is named like F32, BF16 or F8_E4M3."""
    bits = re.search(r"\d+", tensor.get_dtype())
    num_elements: int = math.prod(tensor.get_shape())
    return num_elements * (int(bits[0]) // 8 if bits else 1)


def has_own_head(files: list[Path], rename: Rename, spec: ModelSpec) -> bool:
    """Return True if the files have a head that is not a copy of the embedding.

    config.json is not reliable here: one generation of the transformers library reads the flag from
    text_config, the next one from the whole config, where it is often missing.
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
