"""Files of another user, for tests that any user can run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def give_away(monkeypatch: pytest.MonkeyPatch, path: Path, *, link_alone: bool = False) -> None:
    """Let `path` look as if another user owned it, neither this one nor root. link_alone: the link at `path`,
    and not what it leads to.
    """
    real = os.stat

    def stat(target: Any, **arguments: Any) -> os.stat_result:
        info = real(target, **arguments)
        is_it = not isinstance(target, int) and os.fspath(target) == str(path)
        is_it &= not (link_alone and arguments.get("follow_symlinks", True))
        return os.stat_result((*info[:4], os.getuid() + 1, *info[5:])) if is_it else info

    monkeypatch.setattr(os, "stat", stat)
