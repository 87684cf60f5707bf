"""TensorRT-LLM's names of an executor's settings, as settings of launch.py. Looks at directories; starts
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.base.errors import ConfigError

MAX_POSTPROCESS_WORKERS = 64
ALIASES = {
    "engine_dir": ("model",),
    "tokenizer_dir": ("tokenizer",),
    "postprocess_tokenizer_dir": ("tokenizer",),
    "num_postprocess_workers": ("detokenizer_workers",),
    "gather_all_token_logits": ("gather_context_logits", "gather_generation_logits"),
}
"""TensorRT-LLM's name -> the settings that it stands for."""


def runtime_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `given` asks for; None stands for what was not given.

    Raises: ConfigError for a directory that is not there, for prompts that are not to be cut into chunks, for
    two names of one setting that say different things, and for a wrong number of workers.
    """
    settings: dict[str, Any] = {}
    named_by: dict[str, str] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "enable_chunked_context":
            _check_chunked_context(value)
            continue
        translated = _translated(name, value)
        for setting in ALIASES.get(name, (name,)):
            if settings.setdefault(setting, translated) != translated:
                raise ConfigError(f"{name}: contradicts {named_by[setting]}; give one of them")
            named_by.setdefault(setting, name)
    return settings


def _translated(name: str, value: Any) -> Any:
    if name in ("model", "engine_dir", "tokenizer_dir", "postprocess_tokenizer_dir"):
        return _existing_directory(name, value)
    if name == "num_postprocess_workers":
        return _num_detokenizers(value)
    if name == "gather_all_token_logits" and not isinstance(value, bool):
        raise ConfigError("gather_all_token_logits: true or false")
    return value


def _check_chunked_context(value: Any) -> None:
    if value is not True:
        raise ConfigError(
            f"enable_chunked_context: {value} is not supported, prompts are computed in chunks; a"
            " chunked_prefill_size as large as the longest prompt lets each be one"
        )


def _existing_directory(name: str, value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise ConfigError(f"{name}: a directory, got {type(value).__name__}")
    path = Path(value).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{name}: there is no directory {path}")
    return path


def _num_detokenizers(value: Any) -> int:
    """0 asks for work in the caller's process; here it is done by one process beside it all the same."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_POSTPROCESS_WORKERS:
        raise ConfigError(
            f"num_postprocess_workers: an integer from 0 to {MAX_POSTPROCESS_WORKERS}, got {value!r}"
        )
    return max(1, value)
