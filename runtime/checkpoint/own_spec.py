"""Model specs of the user's own, by import string: `package.module:SPEC`."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, get_args

import msgspec

from runtime.base.errors import ConfigError, StartError
from runtime.base.registry import resolve
from runtime.checkpoint.architectures import Architecture, Windowed
from runtime.checkpoint.config_file import ConfigFile, OptionalKeys

_PACKAGES = tuple(str(Path(__file__).resolve().parents[2] / name) for name in ("model_worker", "runtime"))


def own_row(name: str) -> Architecture:
    """Return the table row that `name` refers to: a row of the user's own, or a plain one made for a
    ModelSpec. Raises ConfigError if there is no such object, if importing it fails, or if only part of it
    would take effect.
    """
    found = _import(name)
    if _is_spec(found):
        return Architecture(name)
    if not isinstance(found, Architecture):
        raise _refused(name, f"it is neither a ModelSpec nor an Architecture, but a {type(found).__name__}")
    _check_row(name, found)
    spec = _import(found.spec)
    if not _is_spec(spec):
        raise _refused(name, f"its spec {found.spec!r} is of type {type(spec).__name__}, not a ModelSpec")
    return found


def _import(name: Any) -> Any:
    if not isinstance(name, str):
        raise ConfigError(f"model_spec: {name!r} is not an import string; name it as 'package.module:SPEC'")
    try:
        return resolve("model_spec", name, {})
    except StartError:
        raise
    except (Exception, SystemExit) as error:  # whatever a module of the user's raises while it is imported
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith(("<", *_PACKAGES))]
        at = theirs[-1]
        raise _refused(
            name,
            f"its module fails while it is imported: {type(error).__name__}: {error} "
            f"({Path(at.filename).name}, line {at.lineno})",
        ) from error


def _is_spec(found: Any) -> bool:
    """Return True for a ModelSpec. It is recognized by its import string, since the class belongs to the
    model worker.
    """
    return isinstance(found, resolve("class", "model_worker.models.spec:ModelSpec", {}))


def _check_row(name: str, row: Architecture) -> None:
    """Raise ConfigError for fields that nothing would read."""
    if row.windowed not in get_args(Windowed):
        known = ", ".join(get_args(Windowed))
        raise _refused(name, f"windowed {row.windowed!r} is unknown; known: {known}")
    fields = {field.name for kind in (ConfigFile, OptionalKeys) for field in msgspec.structs.fields(kind)}
    unknown = sorted(map(str, row.keys.keys() - fields))
    if unknown:
        raise _refused(name, f"keys has {', '.join(unknown)}; known: {', '.join(sorted(fields))}")
    optional = {field.name for field in msgspec.structs.fields(OptionalKeys)}
    read: set[str] = set()
    for field in fields:
        if field in row.keys or field not in optional:
            spelled = row.keys.get(field, field)
            read.update((spelled,) if isinstance(spelled, str) else spelled)
    unread = sorted(map(str, row.defaults.keys() - read))
    if unread:
        raise _refused(name, f"defaults has {', '.join(unread)}, which nothing reads; read: {sorted(read)}")


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"model_spec: {name!r}: {why} (docs/adding_a_model.md)")
