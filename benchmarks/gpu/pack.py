"""Packing of a folder's files into one archive with a maximum size."""

from __future__ import annotations

import os
import tarfile
import zlib
from io import BytesIO
from pathlib import Path

MAX_BYTES = 16 << 20
MAX_LOG_BYTES = 1 << 20
"""Bytes kept of a log's end, whose last lines say why it ended."""
ENTRY_BYTES = 1024
"""Maximum number of bytes of a file in the archive besides its content: header and padding."""


def pack(folder: Path, target: Path, max_bytes: int = MAX_BYTES) -> list[str]:
    """Write the folder's files into a .tgz. Returns the names of those that did not fit, the largest ones."""
    left, left_out = max_bytes - 2 * ENTRY_BYTES, []
    partial = target.with_suffix(".partial")
    files = [path for path in folder.rglob("*") if path.is_file() and path != target]
    with tarfile.open(partial, "w:gz") as archive:
        for path in sorted(files, key=lambda path: path.stat().st_size):
            name = str(path.relative_to(folder))
            content = _content(path)
            num_bytes = len(zlib.compress(content)) + ENTRY_BYTES
            if num_bytes > left:
                left_out.append(name)
                continue
            left -= num_bytes
            _add(archive, name, content, path.stat())
    partial.replace(target)
    return left_out


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        if path.suffix == ".log":
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
        return file.read()


def _add(archive: tarfile.TarFile, name: str, content: bytes, stat: os.stat_result) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(stat.st_mtime)
    archive.addfile(entry, BytesIO(content))
