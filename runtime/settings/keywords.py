"""Settings of a launch as keyword arguments of LLM and GenerationExecutor."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from runtime.base.errors import ConfigError
from runtime.settings import peer_flag as peers
from runtime.settings.config import (
    LISTS,
    PRESETS,
    RuntimeConfig,
    flags_of,
    from_values,
    preset_values,
    refuse_empty,
    setting_of,
)
from runtime.settings.peer_families import family_reason
from runtime.settings.peer_flags import PEER_FLAGS, peer_flag, value_of
from runtime.settings.server_settings import HTTP_SETTINGS

logger = logging.getLogger(__name__)

OWN_SETTINGS = frozenset(HTTP_SETTINGS) | {
    "api_key_file",
    "api_keys",
    "cache_salt_per_api_key",
    "drain_timeout",
    "no_http",
    "parent_pid",
    "port",
    "run_dir",
    "share_prefixes_across_keys",
}
"""Settings that are not accepted as keywords: there is no HTTP server, and run directory and parent are
chosen by the library.
"""
LLM_SETTINGS = frozenset(RuntimeConfig.__struct_fields__) - OWN_SETTINGS
PEER_KEYWORDS = {
    "generation_config": peers.value(
        "--generation-config",
        taken="what SamplingParams leave out is neutral here",
        neutral=("vllm",),
        refused="what a model's generation_config.json recommends is for HTTP alone; give SamplingParams",
    ),
    "disable_uvicorn_access_log": peers.switch(
        "--disable-uvicorn-access-log", taken="there is no HTTP server"
    ),
}
"""Flags of vLLM that correspond to settings of the HTTP server."""
NEAR = 0.75
"""Similarity, at most 1, from which on an unknown keyword or option is taken for a misspelt one. Chosen by
examples.
"""


def given_settings(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings merged over these defaults. A setting that is None counts as not given, as with
    vLLM, whose defaults are None. Unknown ones are kept, to be refused later.
    """
    given = {name: value for name, value in settings.items() if value is not None or not _is_known(name)}
    return {**defaults, **given}


def _is_known(spelling: str) -> bool:
    return any(name in LLM_SETTINGS for name in (setting_of(spelling), setting_of(f"no_{spelling}"))) or (
        peer_flag("--" + spelling.replace("_", "-")) is not None
    )


def _meaning(spelling: str, value: Any) -> Mapping[str, Any]:
    """Return the settings that a keyword stands for: one of our own, or a flag of vLLM or SGLang with
    underscores. Raises ConfigError for one of their flags that is not supported.
    """
    name = setting_of(spelling)
    if (
        off := setting_of(f"no_{spelling}")
    ) in LLM_SETTINGS:  # enable_prefix_caching, whose opposite is a flag
        if not isinstance(value, bool):
            raise ConfigError(f"{spelling}: expected bool, got {value!r}")
        return {off: not value}
    flag = PEER_KEYWORDS.get(spelling) or peer_flag("--" + spelling.replace("_", "-"))
    if flag is not None and name not in RuntimeConfig.__struct_fields__:
        is_json = isinstance(value, dict | list | tuple)
        meaning = flag.meaning(spelling, json.dumps(value, default=str) if is_json else str(value))
    elif isinstance(value, str):
        meaning = value_of(name, spelling, value)
    elif name in LISTS and isinstance(value, list | tuple):
        return {name: _joined(spelling, value)}
    else:
        return {name: value}
    if meaning.note:
        logger.info("%s=%r: nothing changes: %s", spelling, value, meaning.note)
    return meaning.settings


def _joined(spelling: str, words: Sequence[Any]) -> str:
    """Return a list as one comma-separated text. Raises ConfigError for an invalid element."""
    for word in words:
        if not isinstance(word, str | int) or isinstance(word, bool) or "," in str(word):
            raise ConfigError(f"{spelling}: a list has words without commas, got {word!r}")
        refuse_empty(spelling, str(word))
    if not words:
        refuse_empty(spelling, "")
    return ",".join(map(str, words))


def flags_of_keywords(settings: dict[str, Any]) -> list[str]:
    """Return settings as a command line. Raises ConfigError, which names a wrong one."""
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    preset = settings.get("preset")
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise ConfigError(f"preset: {preset!r} is unknown; known: {', '.join(PRESETS)}")
    for spelling, value in given_settings(settings, {}).items():
        if spelling == "preset":
            continue
        if isinstance(value, str) and spelling != "model":  # whose empty text is LLM's own default
            refuse_empty(spelling, value)
        for name, meant in _meaning(spelling, value).items():
            if name not in LLM_SETTINGS:
                raise ConfigError(_unknown(spelling))
            if name in values:
                raise ConfigError(f"{spelling}: {name} is given twice, under two names; give one of them")
            if isinstance(meant, dict) and name in ("hf_overrides", "rope_scaling"):
                meant = msgspec.json.encode(meant).decode()
            values[name] = str(meant) if isinstance(meant, Path) else meant
            given_as[name] = spelling
    if preset is not None:
        # In this order, so that what the caller says wins.
        values = preset_values(preset, str(values.get("batching_type", ""))) | values
    config = from_values(values, given_as)
    flags = []
    for name in values:
        value = getattr(config, name)
        if value == RuntimeConfig.__struct_defaults__[RuntimeConfig.__struct_fields__.index(name)]:
            continue
        flag = "--" + name.replace("_", "-")
        flags.append(flag if value is True else f"{flag}={value}")
    return flags


def _unknown(spelling: str) -> str:
    """Return the error for an unknown keyword."""
    known = ", ".join(sorted(LLM_SETTINGS))
    theirs = {name for flag in PEER_FLAGS if flag.understood or flag.taken for name in flag.names}
    options = theirs.union(*map(flags_of, LLM_SETTINGS))
    keywords = {option[2:].replace("-", "_") for option in options if option.startswith("--")} | LLM_SETTINGS
    near = get_close_matches(spelling, sorted(keywords), n=1, cutoff=NEAR)
    option, *known_options = ("--" + name.replace("_", "-") for name in (spelling, *near))
    if (reason := family_reason(option, known_options)) is not None:
        return f"{spelling}: {reason}"
    if near and spelling not in OWN_SETTINGS:
        return f"{spelling} is not a setting of LLM; did you mean {near[0]}? Known: {known}"
    return f"{spelling} is not a setting of LLM; known: {known}"
