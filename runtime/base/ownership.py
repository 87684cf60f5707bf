"""Ownership: whether another user may have put, changed or read what is at a path.

Root is trusted, since nothing can be kept from it. Only the path itself is looked at, not the directories
above it: who keeps something in a directory that others may rename has to know that.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def fault_of(path: Path, *, is_secret: bool = False, others_may_add: bool = False) -> str | None:
    """Say why what is at `path`, or where a link there leads, cannot be relied on, with what to do; None: it
    can. `is_secret`: others may not read it either. `others_may_add`: it may be a sticky directory, as /tmp
    is, whose files are looked at one by one. Raises OSError.
    """
    info = path.stat()
    if info.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user ({info.st_uid}); it must be this user's or root's"
    if is_secret and info.st_mode & 0o077:
        return f"{path} must be readable by this user alone (chmod 600)"
    if info.st_mode & 0o022 and not (others_may_add and info.st_mode & stat.S_ISVTX):
        return f"{path} can be changed by other users (chmod go-w)"
    return None
