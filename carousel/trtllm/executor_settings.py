"""Conversion of TensorRT-LLM's names of an executor's settings to settings of launch.py. It looks at
directories and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carousel.trtllm.executor_config import without_configs
from runtime.base.errors import ConfigError
from runtime.checkpoint.hub import is_hub_id
from runtime.settings.config import refuse_empty, setting_of

MAX_POSTPROCESS_WORKERS = 64
WHOLE_PROMPT_TOKENS = 8192
"""Default of max_num_tokens when prompts are computed whole, as in TensorRT-LLM: the longest such prompt."""
ALIASES = {
    "engine_dir": ("model",),
    "tokenizer_dir": ("tokenizer",),
    "postprocess_tokenizer_dir": ("tokenizer",),
    "num_postprocess_workers": ("detokenizer_workers",),
    "enable_chunked_context": ("disable_chunked_prefill",),
    "gather_all_token_logits": ("gather_context_logits", "gather_generation_logits"),
}
"""TensorRT-LLM's names -> settings."""


def runtime_settings(given: Mapping[str, Any], named_by: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the settings for the given arguments; None means not given. `named_by` is filled with the
    caller's name of each. Raises: ConfigError for a missing directory, for two names of one setting with
    different values, for a wrong number of workers, and for unsupported features of a configuration object.
    """
    plain, asked = without_configs(given)
    settings: dict[str, Any] = {}
    named_by = {} if named_by is None else named_by

    def add(name: str, setting: str, value: Any) -> None:
        if settings.setdefault(setting, value) != value:
            raise ConfigError(f"{name}: contradicts {named_by[setting]}; give one of them")
        named_by.setdefault(setting, name)

    for name, value in plain.items():
        if value is not None:
            translated = _translated(name, value)
            for setting in ALIASES.get(name, (setting_of(name),)):
                add(name, setting, translated)
    for setting, (name, value) in asked.by_caller.items():
        for own_name in ALIASES.get(setting, (setting,)):
            add(name, own_name, _translated(setting, value))
    # A preset says what is done when nothing is said, and so do these objects.
    if "preset" in settings and (asked.by_caller or asked.by_default):
        raise ConfigError("preset: a configuration object has defaults of its own; give one of them")
    for setting, (name, value) in asked.by_default.items():
        for own_name in ALIASES.get(setting, (setting,)):
            settings.setdefault(own_name, _translated(setting, value))
            named_by.setdefault(own_name, name)
    if settings.get("disable_chunked_prefill") is True and "preset" not in settings:
        settings.setdefault("chunked_prefill_size", WHOLE_PROMPT_TOKENS)
    return settings


def _translated(name: str, value: Any) -> Any:
    if name in ("model", "engine_dir", "tokenizer_dir", "postprocess_tokenizer_dir"):
        return _directory_or_hub_name(name, value)
    if name == "num_postprocess_workers":
        return _num_detokenizers(value)
    if name in ("gather_all_token_logits", "enable_chunked_context") and not isinstance(value, bool):
        raise ConfigError(f"{name}: true or false")
    return not value if name == "enable_chunked_context" else value


def _directory_or_hub_name(name: str, value: Any) -> Path | str:
    if not isinstance(value, str | Path):
        raise ConfigError(f"{name}: a directory or owner/name on the Hub, got {type(value).__name__}")
    if isinstance(value, str):
        refuse_empty(name, value)
        if is_hub_id(value):
            return value
    path = Path(value).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{name}: there is no directory {path}")
    return path


def _num_detokenizers(value: Any) -> int:
    """Return the number of detokenizer processes. 0, which asks for the work to be done in the caller's
    process, is one process.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_POSTPROCESS_WORKERS:
        raise ConfigError(
            f"num_postprocess_workers: an integer from 0 to {MAX_POSTPROCESS_WORKERS}, got {value!r}"
        )
    return max(1, value)
