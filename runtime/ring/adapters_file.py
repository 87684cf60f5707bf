"""AdaptersFile: the adapters that the processes of a launch serve by name, which can change at run time.
Adapters that came with requests are directories in the run directory, each with a note that describes it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from runtime.ring.launch_state import write_atomically

NOTE = "kept.json"
GONE = ".gone"
"""Suffix of the directory of an adapter that is being removed."""
FIRST_ID = 1 << 32
"""First id of named adapters. Ids that callers choose are below it."""


class ListedAdapter(msgspec.Struct, frozen=True):
    path: str
    id: int
    """Number of this combination of name, path and pin; never used for another."""
    pinned: bool = False
    """True if the adapter keeps its device slot: it is not evicted for others."""


class Wanted(NamedTuple):
    """Directory that a name is to refer to, and whether it is pinned."""

    path: str
    pinned: bool = False


class _Content(msgspec.Struct):
    next_id: int
    adapters: dict[str, ListedAdapter]


class AdaptersFile:
    """Table in the run directory, shared by all processes. At first it has the adapters of the settings."""

    def __init__(self, path: Path | None = None, launched: Mapping[str, str] | None = None) -> None:
        """path: the table's file; None: there is none, and the adapters of the settings never change."""
        self._path = path
        self._launched = _Content(
            FIRST_ID + len(launched or {}),
            {
                name: ListedAdapter(folder, FIRST_ID + index)
                for index, (name, folder) in enumerate((launched or {}).items())
            },
        )
        self._read = self._launched.adapters
        self._stamp: tuple[int, int] | None = None

    def read(self) -> Mapping[str, ListedAdapter]:
        """Return the adapters by name. Cheap if the file has not changed. Raises OSError."""
        if self._path is None:
            return self._read
        try:
            info = os.stat(self._path)
        except FileNotFoundError:
            return self._read
        stamp = info.st_ino, info.st_mtime_ns
        if stamp != self._stamp:
            self._read = self._content().adapters
            self._stamp = stamp
        return self._read

    def change(
        self, name: str, decide: Callable[[Mapping[str, ListedAdapter]], Wanted | None]
    ) -> ListedAdapter | None:
        """Change the entry of a name. `decide` gets all adapters by name, and returns what the name is to
        refer to, or None to remove it; if it raises, nothing changes. Other processes that change the file
        wait. Returns the previous entry. Raises OSError.
        """
        assert self._path is not None
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self._content()
            known = content.adapters.get(name)
            wanted = decide(content.adapters)
            if wanted is None:
                content.adapters.pop(name, None)
            elif known is None or known.path != wanted.path or known.pinned or wanted.pinned:
                content.adapters[name] = ListedAdapter(wanted.path, content.next_id, wanted.pinned)
                content.next_id += 1
            write_atomically(self._path, msgspec.json.encode(content))
        return known

    def _content(self) -> _Content:
        assert self._path is not None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return _Content(self._launched.next_id, dict(self._launched.adapters))


class KeptAdapter(msgspec.Struct, frozen=True):
    digest: str
    """SHA-256 of the adapter's config and weights."""
    task_id: int
    num_rows: int
    """Sum of the ranks of all modules of the adapter; see AdapterRef.num_rows."""
    num_bytes: int
    """Bytes of the adapter's weights."""


def incoming_in(folder: Path) -> Path:
    """Return the directory of adapters that are being received."""
    return folder / "incoming"


def kept_in(folder: Path) -> Path:
    """Return the directory of complete adapters."""
    return folder / "kept"


def read_kept(path: Path) -> KeptAdapter | None:
    """Return the note in an adapter's directory, or None."""
    try:
        return msgspec.json.decode((path / NOTE).read_bytes(), type=KeptAdapter)
    except (OSError, msgspec.DecodeError):
        return None


def write_kept(path: Path, kept: KeptAdapter) -> None:
    """Write the note in an adapter's directory. Raises OSError."""
    (path / NOTE).write_bytes(msgspec.json.encode(kept))


def all_kept(folder: Path) -> Iterator[tuple[str, KeptAdapter]]:
    """Yield the paths of complete adapters and their notes, the oldest first."""
    found = kept_in(folder)
    paths = sorted(found.iterdir(), key=lambda path: path.stat().st_ctime_ns) if found.is_dir() else []
    for path in paths:
        if path.suffix != GONE and (kept := read_kept(path)) is not None:
            yield str(path), kept
