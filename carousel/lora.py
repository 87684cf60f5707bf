"""LoRARequest and LoraConfig: adapters of requests, under vLLM's and TensorRT-LLM's names."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_LABEL_CHARS
from runtime.wire.plan import AdapterRef

PARAM = "lora_request"
MAX_ID = (1 << 32) - 1
"""Highest id that callers may use. Higher ids belong to adapters that the launch names."""
MAX_PATH_CHARS = 4096
MAX_TASK_ID = (1 << 63) - 1
INLINE = "lora_config"
SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


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
        """The same as lora_name, as vLLM and TensorRT-LLM have it."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The same as lora_int_id."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The same as lora_path."""
        return self.lora_path


class PackedWeights(NamedTuple):
    """The two files of an adapter's directory, as they are sent."""

    config: bytes
    """Bytes of adapter_config.json."""
    weights: bytes
    """Bytes of adapter_model.safetensors."""
    digest: str
    """SHA-256 of both."""


@dataclass(frozen=True, eq=False)
class LoraConfig:
    """An adapter that the runtime has no directory of: its weights come with the first request that names it.

    task_id: 1 or more; stands for these weights for as long as the runtime keeps them. Each key has its own.
    weights: arrays or tensors by their names in PEFT's adapter_model.safetensors. Later requests may leave it
        out: when the runtime does not keep the weights any more, they fail with code "adapter_not_resident",
        and one with weights puts that right.
    config: the content of PEFT's adapter_config.json; needed where there are weights.

    A wrong value raises InvalidRequest when the request is submitted.
    """

    task_id: int
    weights: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None

    @cached_property
    def packed(self) -> PackedWeights | None:
        """Return the weights as they are sent; None if there are none. Raises InvalidRequest."""
        if self.weights is None:
            if self.config is not None:
                raise _invalid("config", "is that of weights, and there are none", INLINE)
            return None
        if not isinstance(self.weights, Mapping) or not self.weights:
            raise _invalid("weights", "must be arrays by their names in PEFT's file, not packed ones", INLINE)
        if not isinstance(self.config, Mapping):
            raise _invalid("config", "must be what PEFT's adapter_config.json says", INLINE)
        return pack_weights(self.weights, {"peft_type": "LORA", **self.config}, INLINE)


def pack_weights(arrays: Mapping[str, Any], config: Mapping[str, Any], param: str) -> PackedWeights:
    """Return the two files of a directory with these arrays. Raises InvalidRequest."""
    try:
        data = json.dumps(config, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise _invalid("config", f"cannot be written as JSON: {error}", param) from None
    weights = _as_safetensors(arrays, param)
    return PackedWeights(data, weights, hashlib.sha256(data + weights).hexdigest())


def _as_safetensors(arrays: Mapping[str, Any], param: str) -> bytes:
    """Return a safetensors file with these arrays. Raises InvalidRequest."""
    header: dict[str, Any] = {}
    data: list[bytes] = []
    end = 0
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise _invalid("weights", f"has a name that is no text: {name!r:.40}", param)
        kind, shape, each = _numbers(name, array, param)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + len(each)]}
        data.append(each)
        end += len(each)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *data])


def _numbers(name: str, array: Any, param: str) -> tuple[str, list[int], bytes]:
    """Return type, shape and bytes of an array, or of a torch tensor. Raises InvalidRequest."""
    dtype = str(getattr(array, "dtype", "")).removeprefix("torch.")
    if dtype not in SAFETENSORS_NAMES:
        known = ", ".join(SAFETENSORS_NAMES)
        raise _invalid(
            "weights", f"{name:.100}: must be an array of {known}, got {dtype or repr(array):.40}", param
        )
    if hasattr(array, "detach"):
        array = array.detach().cpu().contiguous()
        if dtype == "bfloat16":
            array = array.view(array.new_zeros(0).short().dtype)
        array = array.numpy()
    array = np.ascontiguousarray(array)
    return SAFETENSORS_NAMES[dtype], list(array.shape), array.tobytes()


def inline_for_wire(config: Any) -> AdapterRef | None:
    """Return the adapter that a LoraConfig refers to, once the runtime has it. Raises InvalidRequest."""
    if config is None:
        return None
    if not isinstance(config, LoraConfig):
        raise InvalidRequest(f"{INLINE} must be a LoraConfig, got {type(config).__name__}", param=INLINE)
    number = config.task_id
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_TASK_ID:
        raise _invalid("task_id", f"must be an integer from 1 to {MAX_TASK_ID}, got {number!r:.40}", INLINE)
    _ = config.packed
    return AdapterRef("", number, "", "")


def adapter_for_wire(request: Any) -> AdapterRef | None:
    """Return the adapter in its form on the wire. Raises InvalidRequest, which names what is wrong."""
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


def _invalid(field: str, what: str, param: str = PARAM) -> InvalidRequest:
    return InvalidRequest(f"{param}: {field} {what}", param=param)
