"""Results: the file into which a stage writes its results as they come."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

logger = logging.getLogger("gpu")

MAX_ERROR = 2000
"""Maximum number of characters of an error that are kept."""


class Results:
    """JSON file of a stage, rewritten with each result, so that nothing is lost when the stage is killed.
    "seconds" is present if the stage has ended by itself.
    """

    def __init__(self, path: Path, release: Callable[[], None]) -> None:
        """release: frees device memory that a failed measurement held."""
        self._path, self._release = path, release
        self._began = time.monotonic()
        self.values: dict[str, Any] = {}
        self.num_errors = 0

    def put(self, **values: Any) -> None:
        self.values.update(values)
        # In one step, because a process can be killed while it writes.
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, indent=1))
        partial.replace(self._path)

    def measure(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Store the result of `work` under the name, or {"error": ...}."""
        try:
            self.put(**{name: work()})
        except Exception as error:  # whatever one measurement raises, the others go on
            self.put(**{name: self._failed(name, error)})
        self._release()

    def add(self, name: str, work: Callable[[], dict[str, Any]], **what: Any) -> None:
        """Append the result of `work`, or an "error", to the list of that name, together with `what` was
        measured.
        """
        self.add_each(name, (each() for each in (work,)), **what)

    def add_each(self, name: str, entries: Iterable[dict[str, Any]], **what: Any) -> None:
        """Append each of the entries when it comes. If the iterator raises, an "error" replaces the rest."""
        found: list[dict[str, Any]] = self.values.setdefault(name, [])
        try:
            for entry in entries:
                found.append({**what, **entry})
                logger.info("%s %s", name, found[-1])
                self.put()
        except Exception as error:  # as above
            found.append({**what, **self._failed(name, error)})
            self.put()
        self._release()

    def end(self, error: Exception | None = None) -> None:
        """Write the elapsed time. error: what ended the stage early, so that it is run again."""
        if error is None:
            self.put(seconds=time.monotonic() - self._began)
        else:
            self.put(**self._failed("the stage", error))

    def _failed(self, name: str, error: Exception) -> dict[str, str]:
        self.num_errors += 1
        logger.error("%s failed", name, exc_info=error)
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]}


def is_complete(path: Path) -> bool:
    """Return True if the stage that writes this file has come to its end."""
    return path.exists() and "seconds" in json.loads(path.read_text())
