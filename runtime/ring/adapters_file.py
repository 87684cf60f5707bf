"""AdaptersFile: which adapters the processes of a launch serve by name, which may change while it runs.

Adapters that came with requests are directories of the run directory, each with a note of what it is.
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
"""Entry behind the name of an adapter that is being removed."""
FIRST_ID = 1 << 32
"""First id of adapters that have names; ids that callers choose are below it."""


class ListedAdapter(msgspec.Struct, frozen=True):
    path: str
    id: int
    """Number of this name, path and pin together; never used for another."""
    pinned: bool = False
    """True where the adapter keeps its slot of the device: others do not take it."""


class Wanted(NamedTuple):
    """Directory that a name is to stand for, and whether it is pinned."""

    path: str
    pinned: bool = False


class _Content(msgspec.Struct):
    next_id: int
    adapters: dict[str, ListedAdapter]


class AdaptersFile:
    """The table in the run directory: what the launch says until somebody changes it, for all processes."""

    def __init__(self, path: Path | None = None, launched: Mapping[str, str] | None = None) -> None:
        """Open the table at `path`; None: there is none, and what the launch says never changes."""
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
        """Return the adapters by name. Cheap, where the file has not changed. Raises OSError."""
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
        """Let `decide`, which is given all adapters by name, say what this name is to stand for, or None for
        nothing. It may raise, and nothing changes. Another process that changes the file waits. Return what
        it stood for. Raises OSError.
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
    """Ranks of all modules of the adapter, added up, as AdapterRef.num_rows."""
    num_bytes: int
    """Bytes of the adapter's weights."""


def incoming_in(folder: Path) -> Path:
    """Return the directory of adapters that are on their way."""
    return folder / "incoming"


def kept_in(folder: Path) -> Path:
    """Return the directory of adapters that are complete."""
    return folder / "kept"


def read_kept(path: Path) -> KeptAdapter | None:
    """Return the note in an adapter's directory; None where there is none."""
    try:
        return msgspec.json.decode((path / NOTE).read_bytes(), type=KeptAdapter)
    except (OSError, msgspec.DecodeError):
        return None


def write_kept(path: Path, kept: KeptAdapter) -> None:
    """Write the note in an adapter's directory. Raises OSError."""
    (path / NOTE).write_bytes(msgspec.json.encode(kept))


def all_kept(folder: Path) -> Iterator[tuple[str, KeptAdapter]]:
    """Yield the paths of complete adapters and their notes, the one that was put first before the others."""
    found = kept_in(folder)
    paths = sorted(found.iterdir(), key=lambda path: path.stat().st_ctime_ns) if found.is_dir() else []
    for path in paths:
        if path.suffix != GONE and (kept := read_kept(path)) is not None:
            yield str(path), kept
