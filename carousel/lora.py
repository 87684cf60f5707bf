"""LoRARequest: the adapter that a request is computed with, in vLLM's and TensorRT-LLM's words."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_LABEL_CHARS
from runtime.wire.plan import AdapterRef

PARAM = "lora_request"
MAX_ID = (1 << 32) - 1
"""Ids above it are those of adapters that the launch names."""
MAX_PATH_CHARS = 4096


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: a directory as PEFT writes it, on the machine of the runtime.

    lora_name: any; the KV cache of one name is apart from that of another one.
    lora_int_id: 1 or more; stands for this name and path from its first use on.
    lora_path: of a runtime that the caller's key owns. Empty: the adapter of this name that the launch has
        (--lora-modules), whatever the id.

    A wrong value raises InvalidRequest when the request is submitted.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


def adapter_for_wire(request: Any) -> AdapterRef | None:
    """Return the adapter as a request names it. Raises InvalidRequest that names what is wrong."""
    if request is None:
        return None
    if not isinstance(request, LoRARequest):
        raise InvalidRequest(f"{PARAM} must be a LoRARequest, got {type(request).__name__}", param=PARAM)
    name, number, path = request.lora_name, request.lora_int_id, request.lora_path
    if not isinstance(name, str) or not 0 < len(name) <= MAX_LABEL_CHARS or "/" in name:
        raise _invalid("lora_name", f"must be text of 1 to {MAX_LABEL_CHARS} characters, without a slash")
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_ID:
        raise _invalid("lora_int_id", f"must be an integer from 1 to {MAX_ID}, got {number!r:.40}")
    if not isinstance(path, str | os.PathLike) or len(os.fspath(path)) > MAX_PATH_CHARS:
        raise _invalid("lora_path", f"must be a path of at most {MAX_PATH_CHARS} characters")
    path = os.fspath(path)
    return AdapterRef(name, number, "", os.path.abspath(path) if path else "")


def _invalid(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{PARAM}: {field} {what}", param=PARAM)
