"""Run a module with restricted imports: only the named distributions and their requirements can be imported.

    python -m tests.harness.ring.closed_imports torch,numpy MODULE ARGUMENT ...

The standard library and the project can be imported, too. Everything else is as if it were not installed.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def with_requirements(names: Sequence[str]) -> set[str]:
    """The distributions, and what they require; without extras, for every platform."""
    found: set[str] = set()
    waiting = [normalized(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        plain = (each for each in requirements if "extra ==" not in each)
        waiting += [normalized(re.split(r"[^\w.-]", each, maxsplit=1)[0]) for each in plain]
    return found


class AllowedOnly(MetaPathFinder):
    """In place of all finders: finds what they find, but for modules of other distributions."""

    def __init__(self, allowed: set[str]) -> None:
        self._finders = list(sys.meta_path)
        self._from = metadata.packages_distributions()  # by module
        self._allowed = allowed

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        is_own = top in sys.stdlib_module_names or (ROOT / top).is_dir() or (ROOT / f"{top}.py").exists()
        source = set(map(normalized, self._from.get(top, ())))
        if source and not is_own and not source & self._allowed:
            return None
        specs = (finder.find_spec(name, path, target) for finder in self._finders)
        return next(filter(None, specs), None)


def main() -> None:
    names, module, *arguments = sys.argv[1:]
    sys.meta_path[:] = [AllowedOnly(with_requirements(names.split(",")))]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
