"""Option files: `--config FILE` in YAML, as vLLM and SGLang read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from runtime.base.errors import ConfigError

OPTION = "--config"


def without_files(words: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Take each `--config FILE` out of a command line. Returns the other words, and the files in their order.
    Raises ConfigError if a file name is missing.
    """
    others: list[str] = []
    files: list[Path] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != OPTION:
            others.append(word)
            continue
        value = value if equals else next(rest, "")
        if not value or value.startswith("--"):
            raise ConfigError(f"{OPTION}: expected a file of options in YAML")
        files.append(Path(value))
    return others, files


def options_of(path: Path) -> list[str]:
    """Return a file's options as words of a command line, `--name=value` each. Raises ConfigError, which
    names the file, if it cannot be read, is not YAML, or is not a mapping.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{OPTION} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{OPTION} {path}: no YAML: {problem}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{OPTION} {path}: expected options and their values, `port: 8000` for instance")
    return [_word(path, name, value) for name, value in values.items()]


def _word(path: Path, name: Any, value: Any) -> str:
    if not isinstance(name, str) or not name or name.startswith("-"):
        raise ConfigError(f"{OPTION} {path}: {name!r} is no option; write its name without dashes before it")
    if name == OPTION[2:]:
        raise ConfigError(f"{OPTION} {path}: a file names no other file")
    if value is None:
        raise ConfigError(f"{OPTION} {path}: {name} has no value; leave it out for the default")
    is_plain = isinstance(value, str)
    text = value if is_plain else json.dumps(value, default=str)
    return f"--{name}={text}"
