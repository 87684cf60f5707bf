"""Checkpoints that are files without a model, for code that reads them before anything is loaded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from runtime.settings.config import DEMO_MODEL

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 988097824\n"
TOKENIZER_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def save_checkpoint(path: Path) -> Path:
    """Make `path` a directory with the demo model's configuration and tokenizer, and a tensor of no model."""
    path.mkdir()
    for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        (path / name).write_bytes(_demo_file(name))
    (path / "model.safetensors").write_bytes(safetensors_file())
    return path


@cache
def _demo_file(name: str) -> bytes:
    return (DEMO_MODEL / name).read_bytes()


def safetensors_file(num_floats: int = 16) -> bytes:
    tensor = {"dtype": "F32", "shape": [num_floats], "data_offsets": [0, 4 * num_floats]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "model.norm.weight": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * num_floats)
