"""Threads that look who is alive while launches begin and end. What one alone finds: tests/unit/runtime."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from runtime.ring.run_dir import RunDir, live_run_dirs


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("r")  # sockets' names must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path / "carousel"


def test_clients_that_look_who_is_alive_disturb_neither_each_other_nor_a_launch(root: Path) -> None:
    """Random by its threads: without care about one round in a hundred fails, so a false pass is below 1%."""
    stop = threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not stop.is_set():
            seen.append(len(live_run_dirs()))

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(100):
            run_dir = RunDir()
            run_dir.remove()
    finally:
        stop.set()
        for looker in lookers:
            looker.join()
    assert set(seen) <= {0, 1}
