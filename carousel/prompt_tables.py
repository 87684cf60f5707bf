"""PromptAdapterRequest and PromptTuningConfig: vectors that replace tokens in a prompt (virtual tokens)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from carousel.lora import MAX_ID, MAX_PATH_CHARS, PackedWeights, pack_weights
from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_LABEL_CHARS
from runtime.wire.plan import AdapterRef

NAMED = "prompt_adapter_request"
INLINE = "prompt_tuning_config"
TENSOR = "prompt_embeddings"


@dataclass(frozen=True)
class PromptAdapterRequest:
    """A prompt adapter: a directory as PEFT writes it for prompt tuning, on the machine of the runtime. Its
    virtual tokens stand in front of the prompt.

    prompt_adapter_name: any.
    prompt_adapter_id: 1 or more; stands for this name and path from its first use on.
    prompt_adapter_local_path: of a runtime that the caller's key owns.

    A wrong value raises InvalidRequest when the request is submitted.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str


@dataclass(frozen=True, eq=False)
class PromptTuningConfig:
    """Vectors that come with a request. Ids of the prompt from the vocabulary's size on are rows of them.

    embedding_table: [k, hidden size], an array or tensor of float32, float16 or bfloat16.
    input_token_extra_ids: one number of 64 bits for each id of the prompt; only requests with equal ones
        share cached prefixes. Without them, those with an equal table do.

    A wrong value raises InvalidRequest when the request is submitted.
    """

    embedding_table: Any
    input_token_extra_ids: Sequence[int] | None = None

    @cached_property
    def packed(self) -> PackedWeights:
        """Return the vectors as they are sent. Raises InvalidRequest."""
        shape = tuple(getattr(self.embedding_table, "shape", ()))
        if len(shape) != 2 or not all(shape):
            raise _invalid(INLINE, "embedding_table must be an array [k, hidden size]")
        config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": shape[0], "token_dim": shape[1]}
        return pack_weights({TENSOR: self.embedding_table}, config, INLINE)

    @property
    def number(self) -> int:
        """Number that stands for the vectors: 60 bits of their digest."""
        return int(self.packed.digest[:15], 16) or 1

    @cached_property
    def extra_ids(self) -> bytes:
        """Extra ids, packed. Raises InvalidRequest."""
        ids = self.input_token_extra_ids
        if ids is None:
            return b""
        try:
            return np.asarray(ids, np.uint64).tobytes()
        except (TypeError, ValueError, OverflowError):
            raise _invalid(INLINE, "input_token_extra_ids must be integers of 64 bits") from None


def table_for_wire(named: Any, inline: Any) -> AdapterRef | None:
    """Return the vectors in their form on the wire, once the runtime has them. Raises InvalidRequest."""
    if named is not None and inline is not None:
        raise _invalid(INLINE, f"give it or {NAMED}, not both")
    if inline is not None:
        if not isinstance(inline, PromptTuningConfig):
            raise _invalid(INLINE, f"must be a PromptTuningConfig, got {type(inline).__name__}")
        _ = inline.extra_ids
        return AdapterRef("", inline.number, "", "")
    if named is None:
        return None
    if not isinstance(named, PromptAdapterRequest):
        raise _invalid(NAMED, f"must be a PromptAdapterRequest, got {type(named).__name__}")
    name, number, path = named.prompt_adapter_name, named.prompt_adapter_id, named.prompt_adapter_local_path
    if not isinstance(name, str) or not 0 < len(name) <= MAX_LABEL_CHARS or "/" in name:
        raise _invalid(NAMED, "prompt_adapter_name must be text without a slash")
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_ID:
        raise _invalid(NAMED, f"prompt_adapter_id must be an integer from 1 to {MAX_ID}, got {number!r:.40}")
    if not isinstance(path, str | os.PathLike) or not 0 < len(os.fspath(path)) <= MAX_PATH_CHARS:
        raise _invalid(NAMED, "prompt_adapter_local_path must be the path of a directory")
    return AdapterRef(name, number, "", os.path.abspath(path))


def _invalid(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {what}", param=param)
