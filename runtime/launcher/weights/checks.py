"""Checks of weights that may take the place of a model's while it is served: the settings for it, and each
checkpoint before anything stops. Reads JSON and headers, no tensor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

import msgspec

from runtime.base.errors import CarouselError, ConfigError, InvalidRequest, ModelError
from runtime.checkpoint.checkpoint_config import CheckpointConfig, read_decoder_keys
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.pooling import MODULES_FILE, pooling_file, read_pooling
from runtime.checkpoint.weight_files import INDEX_FILE, StoredTensor, read_header, weight_files
from runtime.settings.config import RuntimeConfig

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
READ_FILES = (
    *(CONFIG_FILE, "generation_config.json", "hf_quant_config.json", INDEX_FILE, TOKENIZER_FILE),
    MODULES_FILE,
)
OTHERWISE_COMPARED = frozenset({"sampling", "dtype"})
"""Facts about a checkpoint that may differ: the dtype, which is a setting by then, and the sampling defaults
with --sampling-defaults openai. Without that they are compared one by one.
"""
INERT_KEYS = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Keys of config.json that change nothing in a model of the transformers library, or that are compared
otherwise.
"""
FLOATS = frozenset({"BF16", "F16", "F32"})
"""Types of stored tensors that are converted to the dtype of the launch."""
_NUM_SHOWN = 3


def with_weight_updates(config: RuntimeConfig) -> RuntimeConfig:
    """Return resolved settings with an absolute --weights-dir. Raises ConfigError for settings with which
    weights cannot be replaced.
    """
    if not config.weights_dir:
        return config
    if not os.path.isdir(config.weights_dir):
        raise ConfigError(f"weights_dir: there is no directory {config.weights_dir}")
    reasons = {
        "restart": (config.restart == "never", "an engine with new weights is a restarted one; use auto"),
        "load_format": (config.load_format == "dummy", "random weights have no checkpoint; leave it out"),
        "nnodes": (config.nnodes > 1, "other machines keep the weights of their start; use one machine"),
    }
    for name, (is_so, reason) in reasons.items():
        if is_so:
            raise ConfigError(f"weights_dir: weights cannot be replaced with {name}: {reason}")
    return msgspec.structs.replace(config, weights_dir=os.path.abspath(config.weights_dir))


def check_new_weights(config: RuntimeConfig, asked: str) -> str:
    """Return the directory of weights that can take the place of those in `config`. Raises InvalidRequest,
    which says why they cannot.
    """
    path = _path_below(config.weights_dir, asked, has_pooling=config.task == "embed")
    if path == os.path.realpath(config.model):
        raise _wrong("these weights are served; write others to another directory", "weights_are_served")
    try:
        _check_config(config, Path(path))
        _check_tensors(config, Path(path))
        _check_tokenizer(config, Path(path))
    except InvalidRequest:
        raise
    except (CarouselError, OSError) as error:
        raise _wrong(str(error)) from None
    return path


def _path_below(weights_dir: str, asked: str, *, has_pooling: bool) -> str:
    """Return the real path of a directory, which like all of its files that are read lies below
    `weights_dir`. has_pooling: True if the file of its pooling is one of them.
    """
    allowed = os.path.realpath(weights_dir)
    try:
        path = os.path.realpath(os.path.join(allowed, asked))
        if path == allowed or not _is_below(path, allowed):
            raise _wrong("it leads out of --weights-dir")
        if not os.path.isdir(path):
            raise _wrong(f"there is no directory {path}")
        _check_below([Path(path, name) for name in READ_FILES], allowed)
        _check_below(weight_files(Path(path)), allowed)
        if has_pooling and (file := pooling_file(Path(path))) is not None:
            _check_below([file], allowed)
    except (OSError, ValueError):
        raise _wrong("it is no path") from None
    except ModelError as error:
        raise _wrong(str(error)) from None
    return path


def _check_below(files: Sequence[Path], allowed: str) -> None:
    if not all(_is_below(os.path.realpath(file), allowed) for file in files):
        raise _wrong("a file of it leads out of --weights-dir")


def _is_below(path: str, allowed: str) -> bool:
    return os.path.commonpath([allowed, path]) == allowed


def _check_config(config: RuntimeConfig, path: Path) -> None:
    served, new = (_facts(config, each) for each in (Path(config.model), path))
    name = next((each for each in [*served, *new] if served.get(each) != new.get(each)), None)
    if name is not None:
        raise _wrong(
            f"{CONFIG_FILE}, generation_config.json: {name} is {_shown(new.get(name))}; the model that is "
            f"served has {_shown(served.get(name))}"
        )
    if config.task == "embed" and read_pooling(path, config.pooling) != read_pooling(
        Path(config.model), config.pooling
    ):
        raise _wrong("its pooling is another one than that of the model that is served")


def _facts(config: RuntimeConfig, path: Path) -> dict[str, Any]:
    """Return what processes take from a checkpoint beside its weights."""
    if config.model_impl == "native":
        model: CheckpointConfig = ModelConfig.from_path(
            path, config.context_length, config.model_spec, config.hf_overrides
        )
        keys: dict[str, Any] = {}
    else:
        model = CheckpointConfig.read(path, config.hf_overrides)
        keys = read_decoder_keys(path / CONFIG_FILE, config.hf_overrides)
    facts = {name: value for name, value in keys.items() if name not in INERT_KEYS}
    facts |= msgspec.structs.asdict(model)
    facts = {name: value for name, value in facts.items() if name not in OTHERWISE_COMPARED}
    if config.sampling_defaults == "model":
        # An HTTP process that is started again reads them from the checkpoint that is served by then.
        facts |= msgspec.structs.asdict(model.sampling)
    return facts


def _check_tensors(config: RuntimeConfig, path: Path) -> None:
    """Check that the tensors have the names, shapes and types of those that are served."""
    served, new = (_tensors(each) for each in (Path(config.model), path))
    if missing := served.keys() - new.keys():
        raise _wrong(f"it lacks tensors: {_few(sorted(missing))}")
    if unknown := new.keys() - served.keys():
        raise _wrong(f"it has other tensors than those that are served: {_few(sorted(unknown))}")
    is_quantized = any(tensor.dtype not in FLOATS for tensor in served.values())
    for name, tensor in served.items():
        if new[name].shape != tensor.shape:
            raise _wrong(f"{name} has the shape {new[name].shape}; the one that is served {tensor.shape}")
        is_same = new[name].dtype == tensor.dtype
        if not is_same and (is_quantized or new[name].dtype not in FLOATS):
            raise _wrong(f"{name} is {new[name].dtype}; the one that is served {tensor.dtype}")


def _tensors(path: Path) -> Mapping[str, StoredTensor]:
    return dict(item for file in weight_files(path) for item in read_header(file).items())


def _check_tokenizer(config: RuntimeConfig, path: Path) -> None:
    """Check that a tokenizer beside the weights is the one that is served. There may be none."""
    file = path / TOKENIZER_FILE
    if not config.tokenizer or not file.is_file():
        return
    if _digest(file) != _digest(Path(config.tokenizer) / TOKENIZER_FILE):
        raise _wrong(
            f"its {TOKENIZER_FILE} is not that of the launch, which stays; if they only differ in how they "
            "are written, leave it out"
        )


def _digest(file: Path) -> bytes:
    with file.open("rb") as source:
        return file_digest(source, "sha256").digest()


def _few(names: list[str]) -> str:
    rest = len(names) - _NUM_SHOWN
    return ", ".join(names[:_NUM_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _shown(value: object) -> str:
    return f"{value!r:.100}"


def _wrong(problem: str, code: str = "invalid_weights") -> InvalidRequest:
    return InvalidRequest(f"model_path: {problem}", param="model_path", code=code)
