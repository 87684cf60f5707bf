"""Overrides of config.json: --hf-overrides and --rope-scaling. The launcher combines both into one JSON
object that fits the file, and all processes apply it key by key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from runtime.base.errors import ConfigError, ModelError
from runtime.checkpoint.architectures import Architecture
from runtime.checkpoint.checkpoint_config import (
    CONTEXT_KEYS,
    CheckpointConfig,
    config_file,
    read_decoder_keys,
)
from runtime.checkpoint.config_file import known_keys
from runtime.checkpoint.model_config import read_model_config
from runtime.checkpoint.own_spec import own_row
from runtime.settings.config import RuntimeConfig

STRETCHING = ("linear", "yarn")
"""Rope types whose factor says how much longer the context becomes."""
ROPE_KINDS = {"full_attention", "sliding_attention"}
ROPE_KEYS = ("rope_scaling", "rope_parameters")


def read_overridden(config: RuntimeConfig, model_path: Path) -> tuple[RuntimeConfig, CheckpointConfig]:
    """Return the settings with all overrides in `hf_overrides`, and the checkpoint with the overrides
    applied. Raises ConfigError, which names the setting, for errors that an override causes, and ModelError
    for errors of the files.
    """
    complete = with_overrides(config, model_path)
    try:
        return complete, _read(complete, model_path)
    except ModelError as error:
        if not complete.hf_overrides or _error(config, model_path, ("hf_overrides", "rope_scaling")) == str(
            error
        ):
            raise
        in_hf_overrides = not config.rope_scaling or (
            config.hf_overrides and _error(config, model_path, ("rope_scaling",)) == str(error)
        )
        name = "hf_overrides" if in_hf_overrides else "rope_scaling"
        flag = name.replace("_", "-")
        raise ConfigError(f"{name}: what --{flag} says will not do: {error}") from None


def _read(config: RuntimeConfig, model_path: Path) -> CheckpointConfig:
    return read_model_config(
        model_path, config.model_impl, model_spec=config.model_spec, overrides=config.hf_overrides
    )


def _error(config: RuntimeConfig, model_path: Path, without: tuple[str, ...]) -> str:
    """Return the error that remains without these settings; empty if there is none."""
    fewer = msgspec.structs.replace(config, **dict.fromkeys(without, ""))
    try:
        _read(with_overrides(fewer, model_path), model_path)
    except ModelError as error:
        return str(error)
    return ""


def with_overrides(config: RuntimeConfig, model_path: Path) -> RuntimeConfig:
    """Return the settings with all overrides completed in `hf_overrides`. Raises ConfigError, ModelError."""
    if not config.hf_overrides and not config.rope_scaling:
        return config
    overrides = _object("hf_overrides", config.hf_overrides)
    raw = read_decoder_keys(config_file(model_path))
    for key in ROPE_KEYS:
        if not isinstance(value := overrides.get(key, {}), dict | None):
            raise ConfigError(f"hf_overrides: {key}: an object or null is needed, got {value!r}")
    _refuse_unknown(raw, overrides, own_row(config.model_spec) if config.model_spec else None)
    if "rope_theta" in overrides:
        _put_theta_where_it_is_read(raw, overrides)
    if overrides.get("rope_scaling") is not None and raw.get("rope_parameters"):
        if "rope_parameters" in overrides:
            raise ConfigError("hf_overrides: rope_scaling is another name of rope_parameters; give one")
        _put_rope(raw, overrides, "hf_overrides", overrides.pop("rope_scaling"))
    if config.rope_scaling:
        for key in ROPE_KEYS:
            if key in overrides and (key == "rope_scaling" or "rope_theta" not in overrides):
                raise ConfigError(f"rope_scaling: hf_overrides says {key} as well; give one of them")
        scaling = _object("rope_scaling", config.rope_scaling)
        if not scaling:
            raise ConfigError("rope_scaling: the object is empty; leave it out for what config.json says")
        context_key = next((key for key in CONTEXT_KEYS if raw.get(key) is not None), CONTEXT_KEYS[0])
        if context_key not in overrides:
            _stretch(raw, overrides, scaling, context_key)
        _put_rope(raw, overrides, "rope_scaling", scaling)
    return msgspec.structs.replace(
        config, hf_overrides=msgspec.json.encode(overrides).decode(), rope_scaling=""
    )


def _object(name: str, text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except RecursionError:
        raise ConfigError(f"{name}: the JSON object is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name}: a JSON object, like '{{\"key\": 1}}', is needed: {error}") from None


def _refuse_unknown(raw: dict[str, Any], overrides: dict[str, Any], own: Architecture | None) -> None:
    if "text_config" in overrides:
        raise ConfigError(
            "hf_overrides: text_config: give the decoder's keys themselves, not below text_config"
        )
    known = known_keys(raw | {key: overrides[key] for key in ("architectures",) if key in overrides}, own)
    for key in overrides:
        if key not in known:
            raise ConfigError(
                f"hf_overrides: the model's config.json has no {key!r}, and nothing would read it here; its "
                f"keys: {', '.join(sorted(raw.keys() - {'auto_map'}))}"
            )


def _put_theta_where_it_is_read(raw: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Move theta among the rotary parameters if the file has it there. These win over a key beside them."""
    parameters = overrides.get("rope_parameters", raw.get("rope_parameters"))
    if not isinstance(parameters, dict) or not parameters:
        return  # the reader of the file reports anything else
    _refuse_kinds("hf_overrides", parameters)
    overrides["rope_parameters"] = parameters | {"rope_theta": overrides["rope_theta"]}


def _put_rope(raw: dict[str, Any], overrides: dict[str, Any], name: str, scaling: dict[str, Any]) -> None:
    """Store the scaling under the key that the file uses, and keep its theta and partial factor."""
    parameters = overrides.get("rope_parameters", raw.get("rope_parameters"))
    if not isinstance(parameters, dict) or not parameters:
        overrides["rope_scaling"] = scaling
        return
    _refuse_kinds(name, parameters)
    kept = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    overrides["rope_parameters"] = kept | scaling


def _refuse_kinds(name: str, parameters: dict[str, Any]) -> None:
    if parameters.keys() <= ROPE_KINDS:
        raise ConfigError(
            f"{name}: this model's layers have rotary embeddings of several kinds; say all of them with "
            "--hf-overrides '{\"rope_parameters\": {...}}'"
        )


def _stretch(
    raw: dict[str, Any], overrides: dict[str, Any], scaling: dict[str, Any], context_key: str
) -> None:
    """Extend the context length to the length that the scaling is meant for, as vLLM does."""
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    context = raw.get(context_key)
    if kind not in STRETCHING or not isinstance(factor, int | float) or not isinstance(context, int):
        return  # the reader reports what is wrong, if anything is
    if kind == "yarn":
        context = scaling.setdefault("original_max_position_embeddings", context)
    if isinstance(context, int) and factor > 0:
        try:
            overrides[context_key] = round(context * factor)
        except OverflowError:
            raise ConfigError(f"rope_scaling: no context is {factor:g} times as long as {context}") from None
