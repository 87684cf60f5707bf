"""Ownership: checks that no other user can have written, changed or read the file at a path.

Root is trusted, because nothing can be protected from it. Only the path itself is checked, not the
directories above it: the caller must not keep the file in a directory that others may rename.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def fault_of(path: Path, *, is_secret: bool = False, others_may_add: bool = False) -> str | None:
    """Return why the file at `path`, or a link there or its target, cannot be trusted, and what to do; None
    if it can. is_secret: others must not be able to read it either. others_may_add: it may be a sticky
    directory such as /tmp, whose files are checked one by one. Raises OSError.
    """
    own = (os.getuid(), 0)
    link, info = path.lstat(), path.stat()
    # What it leads to may be in order when it is looked at, and something else when it is used.
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in own:
        return f"{path} is a link of another user ({link.st_uid}); it must be this user's or root's"
    if info.st_uid not in own:
        return f"{path} belongs to another user ({info.st_uid}); it must be this user's or root's"
    if is_secret and info.st_mode & 0o077:
        return f"{path} must be readable by this user alone (chmod 600)"
    if info.st_mode & 0o022 and not (others_may_add and info.st_mode & stat.S_ISVTX):
        return f"{path} can be changed by other users (chmod go-w)"
    return None
