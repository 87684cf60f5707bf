"""Prompt tuning directories in the format of the PEFT library: a table with a vector for each virtual token.

Reads the config and the header of the weights. Kinds of prompt tuning that use an encoder, or insert into
each layer, are refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from runtime.base.errors import ModelError
from runtime.checkpoint.adapters.lora_config import (
    ELEMENT_BYTES,
    WEIGHTS_FILE,
    decoded_config,
    files_version,
    read_adapter,
    refused,
    short,
    why_no_weights,
)
from runtime.checkpoint.weight_files import read_header

KIND = "PROMPT_TUNING"
TENSOR = "prompt_embeddings"
MAX_TOKENS = 1 << 14
_REASONS = {
    "PREFIX_TUNING": "keys and values of each layer are not put in front",
    "P_TUNING": "its encoder is not computed",
    "MULTITASK_PROMPT_TUNING": "tables that are made of several are not",
    "ADAPTION_PROMPT": "gates of layers are not computed",
    "CPT": "its loss over labels is not known here",
}
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
        *("peft_version", "num_attention_heads", "num_layers", "prompt_tuning_init"),
        *("prompt_tuning_init_text", "prompt_tuning_init_state_dict_path", "tokenizer_name_or_path"),
        "tokenizer_kwargs",
    }
)
"""Keys that concern training only."""


class _ConfigFile(Struct):
    peft_type: str
    num_virtual_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    token_dim: int | None = None
    num_transformer_submodules: int | None = None


class PromptTable(Struct, frozen=True):
    """A prompt table that can be served, as far as this can be said without the model."""

    path: Path
    version: str
    num_tokens: int
    width: int

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS_FILE


class AdapterFiles(Struct, frozen=True):
    """Version and size of an adapter's directory, as in AdapterRef."""

    version: str
    num_rows: int
    num_virtual: int


def read_prompt_table(path: Path) -> PromptTable:
    """Read a prompt tuning directory. Raises InvalidRequest, which names file, field and reason."""
    data, raw = decoded_config(path)
    kind = raw.get("peft_type")
    if kind != KIND:
        reason = "a prompt adapter is of PROMPT_TUNING"
        if isinstance(kind, str):
            reason = _REASONS.get(kind, reason)
        raise refused(path, f"peft_type: {short(kind)} is not served: {reason}")
    for key, value in raw.items():
        if value and key not in _WITHOUT_EFFECT and key not in _ConfigFile.__struct_fields__:
            raise refused(path, f"{key}: {short(value)} is not served: what it does is not known here")
    try:
        config = msgspec.convert(raw, _ConfigFile)
    except msgspec.ValidationError as error:
        raise refused(path, f"adapter_config.json cannot be read: {error}") from None
    if config.num_transformer_submodules not in (None, 1):
        raise refused(path, "num_transformer_submodules: models with an encoder are not served")
    try:
        if not (path / WEIGHTS_FILE).is_file():
            raise refused(path, why_no_weights(path))
        tensors, status = read_header(path / WEIGHTS_FILE), (path / WEIGHTS_FILE).stat()
    except OSError as error:
        raise refused(path, f"{WEIGHTS_FILE} cannot be read: {error.strerror}") from None
    except ModelError as error:
        raise refused(path, str(error)) from None
    if set(tensors) != {TENSOR}:
        raise refused(path, f"{WEIGHTS_FILE} must have {TENSOR} and nothing else")
    table = tensors[TENSOR]
    shape = list(table.shape)
    if table.dtype not in ELEMENT_BYTES or len(shape) != 2 or shape[0] != config.num_virtual_tokens:
        wanted = f"[{config.num_virtual_tokens}, width]"
        raise refused(path, f"{TENSOR} is {list(table.shape)} of {table.dtype}, and not {wanted}")
    if table.num_bytes != ELEMENT_BYTES[table.dtype] * table.shape[0] * table.shape[1]:
        raise refused(path, f"{WEIGHTS_FILE} lies: {TENSOR} has other bytes than its shape says")
    if config.token_dim not in (None, table.shape[1]):
        raise refused(path, f"token_dim: {config.token_dim}, and the vectors are of {table.shape[1]}")
    return PromptTable(path, files_version(data, status), table.shape[0], table.shape[1])


def read_files(path: Path, max_rank: int, *, is_table: bool) -> AdapterFiles:
    """Read a directory of an adapter, or of prompt tuning. Raises InvalidRequest."""
    if is_table:
        table = read_prompt_table(path)
        return AdapterFiles(table.version, 0, table.num_tokens)
    config = read_adapter(path, max_rank)
    return AdapterFiles(config.version, config.num_rows, 0)
