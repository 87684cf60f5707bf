"""Option files: `--config FILE` in YAML, as vLLM and SGLang read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from runtime.base.errors import ConfigError

OPTION = "--config"


class _Int(int):
    """A whole number, and how it is written: as a key or a name, 0123 is not 83."""

    written: str


class _Float(float):
    """A number, and how it is written: as a name, 1.10 is not 1.1."""

    written: str


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Keeps what a file says beside what YAML takes it for. Dates are text."""


def _int(loader: Any, node: Any) -> _Int:
    number = _Int(loader.construct_yaml_int(node))
    number.written = node.value
    return number


def _float(loader: Any, node: Any) -> _Float:
    number = _Float(loader.construct_yaml_float(node))
    number.written = node.value
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)


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
        files.append(Path(expanduser(value)))
    return others, files


def options_of(path: Path) -> list[str]:
    """Return a file's options as words of a command line, `--name=value` each. Raises ConfigError, which
    names the file, if it cannot be read, is not YAML, or is not a mapping.
    """
    try:
        values = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"{OPTION} {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: it is not UTF-8, or a number is too long
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
    value = [_written(each) for each in value] if isinstance(value, list) else _written(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"--{name}={text}"


def _written(value: Any) -> Any:
    return value.written if isinstance(value, _Int | _Float) else value
