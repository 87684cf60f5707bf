"""Lookup of implementations by name: in a table of `name -> "module:Attribute"`, or the user's own as
`"module:Attribute"`.

Nothing is imported until it is chosen. A module that does not exist and a module that fails while it is
imported give different errors.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from runtime.base.errors import ConfigError


def resolve(kind: str, name: str, table: Mapping[str, str]) -> Any:
    """Return the object that `name` refers to. kind: word that users know it by, such as "schedule policy".
    Raises ConfigError if the name is unknown, or its module or attribute does not exist. An exception inside
    the module while it is imported is passed on unchanged, so that its author sees where it was raised.
    """
    path = table.get(name, name)
    if ":" not in path:
        if not table:
            raise ConfigError(f"{kind} {name!r}: name your own as 'package.module:Name'; there are no others")
        known = ", ".join(sorted(table))
        raise ConfigError(f"unknown {kind} {name!r}; known: {known}, or your own as 'package.module:Name'")
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ConfigError(f"{kind} {name!r}: there is no module {module_name!r}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{kind} {name!r}: module {module_name!r} has no {attribute!r}") from None
