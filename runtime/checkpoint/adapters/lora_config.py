"""LoRA adapter directories in the format of the PEFT library: reads one, and refuses it if it cannot be
served.

Reads adapter_config.json and the header of adapter_model.safetensors, but no tensor. Every key that is not
supported is refused by name, so that no adapter is served in part. The worker, which has the model, checks
that the adapter's modules are the model's.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from runtime.base.errors import InvalidRequest, ModelError
from runtime.checkpoint.weight_files import StoredTensor, read_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
PREFIX = "base_model.model."
"""Prefix of module names in the weights file."""
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_SHOWN = 4  # names in a message

Pattern = Annotated[str, Meta(max_length=1024)]
Rank = Annotated[int, Meta(ge=1, le=1 << 16)]


class _ConfigFile(Struct):
    """Keys of adapter_config.json that say what an adapter computes."""

    peft_type: str
    r: Rank
    target_modules: list[Pattern] | Pattern
    lora_alpha: float = 8.0
    use_rslora: bool = False
    rank_pattern: dict[Pattern, Rank] | None = None
    alpha_pattern: dict[Pattern, float] | None = None
    layers_to_transform: list[int] | int | None = None
    exclude_modules: list[Pattern] | Pattern | None = None
    init_lora_weights: bool | str | None = True


_READ = frozenset(field.name for field in msgspec.structs.fields(_ConfigFile))
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
        *("peft_version", "lora_dropout", "layers_pattern", "megatron_core", "megatron_config"),
        *("runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
        *("qalora_group_size", "ensure_weight_tying"),
    }
)
"""Keys that concern training, or that are only read together with one that is refused."""
_REASONS = {
    "use_dora": "DoRA is not computed",
    "bias": "biases that were trained with it are not applied",
    "lora_bias": "a bias of the adapter itself is not applied",
    "modules_to_save": "whole modules that were trained with it are not replaced",
    "trainable_token_indices": "trained rows of the embedding are not replaced",
    "fan_in_fan_out": "weights are [outputs, inputs] here",
    "layer_replication": "the model's layers are those of its checkpoint",
    "target_parameters": "parameters that are no linear layer's, such as experts, have no adapters",
    "use_qalora": "pooled inputs are not computed",
    "alora_invocation_tokens": "an adapter holds for the whole prompt",
}
"""Reason why each of these keys must have no value. Any other unknown key must have none either."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights under which the base model's weights differ from the checkpoint's."""


class AdapterModule(Struct, frozen=True):
    """A linear layer that an adapter changes: y += scaling * B (A x)."""

    name: str
    """Path of the module in the base model's checkpoint."""
    rank: int
    scaling: float
    in_features: int
    out_features: int

    def tensor(self, side: str) -> str:
        """Return the tensor name of A [rank, in_features] or B [out_features, rank]."""
        return f"{PREFIX}{self.name}.lora_{side}.weight"


class AdapterConfig(Struct, frozen=True):
    """An adapter directory that can be served, as far as this can be said without the model."""

    path: Path
    version: str
    """Digest of the config, and of size and time of the weights file."""
    modules: tuple[AdapterModule, ...]
    targets: _Targets

    @property
    def rank(self) -> int:
        """Return the largest rank of a module."""
        return max(module.rank for module in self.modules)

    @property
    def num_rows(self) -> int:
        """Return the sum of the ranks of all modules."""
        return sum(module.rank for module in self.modules)

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS_FILE


class _Targets(Struct, frozen=True):
    """The modules that the config names as changed."""

    modules: list[str] | str
    excluded: list[str] | str | None
    layers: frozenset[int] | None

    def names(self, module: str) -> bool:
        """Return True if the config names this module of the base model."""
        if self.layers is not None:
            layer = _LAYER.fullmatch(module)
            if layer is None or int(layer[1]) not in self.layers:
                return False
        if self.excluded and _matches(self.excluded, module):
            return False
        return self.modules == "all-linear" or _matches(self.modules, module)


def _matches(wanted: list[str] | str, module: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == each or module.endswith(f".{each}") for each in wanted)


def read_adapter(path: Path, max_rank: int) -> AdapterConfig:
    """Read an adapter's directory. Raises InvalidRequest, which names the file, the field and the reason, if
    it cannot be served completely.
    """
    data, file = _read_config(path)
    try:
        weights = path / WEIGHTS_FILE
        if not weights.is_file():
            raise refused(path, why_no_weights(path))
        tensors, status = read_header(weights), weights.stat()
    except OSError as error:
        raise refused(path, f"{WEIGHTS_FILE} cannot be read: {error.strerror}") from None
    except ModelError as error:
        raise refused(path, str(error)) from None
    targets = _targets(path, file)
    config = AdapterConfig(path, files_version(data, status), _modules(path, file, targets, tensors), targets)
    if config.rank > max_rank:
        raise refused(path, f"r: rank {config.rank} is above --max-lora-rank {max_rank}")
    return config


def version_of(path: Path) -> str:
    """Return the version of the directory's present content. Raises InvalidRequest and OSError."""
    return files_version(decoded_config(path)[0], (path / WEIGHTS_FILE).stat())


def files_version(config: bytes, weights: os.stat_result) -> str:
    """Return the digest of a config, and of size and time of weights."""
    digest = hashlib.sha256(config + msgspec.json.encode([weights.st_size, weights.st_mtime_ns]))
    return digest.hexdigest()[:32]


def refused(path: Path, reason: str) -> InvalidRequest:
    """Return the error for an adapter that is refused."""
    return InvalidRequest(f"the adapter in {path}: {reason}", param="adapter", code="invalid_adapter")


def why_no_weights(path: Path) -> str:
    """Return the message about a directory without weights."""
    if (path / "adapter_model.bin").is_file():
        return f"adapter_model.bin is a pickle, which is not read: save it as {WEIGHTS_FILE}"
    return f"it has no {WEIGHTS_FILE}"


def _read_config(path: Path) -> tuple[bytes, _ConfigFile]:
    """Return adapter_config.json, raw and decoded into _ConfigFile."""
    data, raw = decoded_config(path)
    _refuse_what_is_not_read(path, raw)
    try:
        return data, msgspec.convert(raw, _ConfigFile)
    except msgspec.ValidationError as error:
        raise refused(path, f"{CONFIG_FILE} cannot be read: {error}") from None


def decoded_config(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return adapter_config.json, raw and decoded. Raises InvalidRequest."""
    if not path.is_dir():
        raise refused(path, "there is no such directory")
    try:
        with (path / CONFIG_FILE).open("rb") as config:
            data = config.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise refused(path, f"{CONFIG_FILE} cannot be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise refused(path, f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        return data, msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(path, f"{CONFIG_FILE} cannot be read: {error}") from None


def _refuse_what_is_not_read(path: Path, raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise refused(path, f"peft_type: {short(kind)} is not served, LORA alone is")
    for key, value in raw.items():
        if key in _READ or key in _WITHOUT_EFFECT or not value or (key == "bias" and value == "none"):
            continue
        reason = _REASONS.get(key, "what it does is not known here")
        raise refused(path, f"{key}: {short(value)} is not served: {reason}")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        reason = "it was trained beside other base weights; convert it to a plain LoRA"
        raise refused(path, f"init_lora_weights: {short(init)} is not served: {reason}")


def short(value: object) -> str:
    """Return a value for a message, or the beginning of a long one."""
    try:
        text = repr(value)
    except RecursionError:
        return "a value that is nested too deep"
    return text if len(text) <= 80 else f"{text[:80]}…"


def _targets(path: Path, file: _ConfigFile) -> _Targets:
    layers = file.layers_to_transform
    if isinstance(layers, int):
        layers = [layers]
    for field in ("target_modules", "exclude_modules"):
        if isinstance(pattern := getattr(file, field), str):
            _compiled(path, field, pattern)
    return _Targets(file.target_modules, file.exclude_modules, None if layers is None else frozenset(layers))


def _compiled(path: Path, field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise refused(path, f"{field}: {short(pattern)} is no regular expression: {error}") from None
    except RecursionError:
        raise refused(path, f"{field}: {short(pattern)} is nested too deep") from None


def _modules(
    path: Path, file: _ConfigFile, targets: _Targets, tensors: Mapping[str, StoredTensor]
) -> tuple[AdapterModule, ...]:
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None or not name.startswith(PREFIX):
            raise refused(path, f"{WEIGHTS_FILE} has {short(name)}: {_kind_of(name)}")
        if tensor.dtype not in ELEMENT_BYTES:
            raise refused(path, f"{name} is of {tensor.dtype}; read are {', '.join(ELEMENT_BYTES)}")
        if tensor.num_bytes != ELEMENT_BYTES[tensor.dtype] * math.prod(tensor.shape):
            raise refused(path, f"{WEIGHTS_FILE} lies: {name} has other bytes than its shape says")
        sides.setdefault(found["module"].removeprefix(PREFIX), {})[found["side"]] = tensor
    if not sides:
        raise refused(path, f"{WEIGHTS_FILE} has no tensors of an adapter")
    _refuse_strangers(path, targets, sides)
    rank_of = _PatternValues(path, "rank_pattern", file.rank_pattern)
    alpha_of = _PatternValues(path, "alpha_pattern", file.alpha_pattern)
    make = partial(_module, path, is_stabilised=file.use_rslora)
    return tuple(
        make(name, sides[name], rank=int(rank_of(name, file.r)), alpha=alpha_of(name, file.lora_alpha))
        for name in sorted(sides)
    )


def _kind_of(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "DoRA is not computed"
    if "lora_embedding" in name:
        return "adapters of the embedding are not computed"
    return "only lora_A and lora_B of linear layers are read"


def _refuse_strangers(path: Path, targets: _Targets, modules: Iterable[str]) -> None:
    """Raise InvalidRequest for modules that cannot have adapters, or that the config does not name."""
    for name in modules:
        last = name.rpartition(".")[2]
        if last in ("lm_head", "embed_tokens"):
            raise refused(path, f"target_modules: adapters of {last} are not computed")
        if ".experts." in name:
            raise refused(path, f"target_modules: adapters of experts are not computed ({name})")
    others = sorted(name for name in modules if not targets.names(name))
    if others:
        shown = ", ".join(others[:_SHOWN])
        raise refused(path, f"target_modules: it does not name modules of {WEIGHTS_FILE}: {shown}")


class _PatternValues:
    """Values of rank_pattern or alpha_pattern. Each holds for the modules whose names end as its key says."""

    def __init__(self, path: Path, field: str, values: Mapping[str, float] | None) -> None:
        self._values = [
            (_compiled(path, field, rf"(?:.*\.)?(?:{key})"), value) for key, value in (values or {}).items()
        ]

    def __call__(self, module: str, otherwise: float) -> float:
        return next((value for key, value in self._values if key.fullmatch(module)), otherwise)


def _module(
    path: Path, name: str, sides: Mapping[str, StoredTensor], *, rank: int, alpha: float, is_stabilised: bool
) -> AdapterModule:
    for side in "AB":
        if side not in sides:
            raise refused(path, f"{WEIGHTS_FILE} lacks lora_{side} of {name}")
    shapes = sides["A"].shape, sides["B"].shape
    if any(len(shape) != 2 for shape in shapes) or (shapes[0][0], shapes[1][1]) != (rank, rank):
        raise refused(
            path,
            f"{name} has lora_A {list(shapes[0])} and lora_B {list(shapes[1])}, which is not of rank {rank}",
        )
    scaling = alpha / (math.sqrt(rank) if is_stabilised else rank)
    if not math.isfinite(scaling):
        raise refused(path, f"lora_alpha: {alpha} is no number to multiply with")
    return AdapterModule(name, rank, scaling, shapes[0][1], shapes[1][0])
