"""In which order a launch says how it is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.children import Child, Place
from runtime.config import RuntimeConfig
from runtime.launch_state import LaunchState
from runtime.supervisor import Supervisor


@contextmanager
def started(config: RuntimeConfig) -> Iterator[Supervisor]:
    """Of a launch that has started no process yet."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    supervisor = Supervisor(config)
    try:
        yield supervisor
    finally:
        supervisor.names.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True)) as supervisor:
        yield supervisor


@pytest.mark.parametrize(("state", "slot_is_first"), [("ready", True), ("failed", False)])
def test_the_slot_says_ready_before_the_file_and_failed_after_it(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, state: str, slot_is_first: bool
) -> None:
    """A request by whoever reads "ready" in the file is served, and who sees "failed" finds the reason."""
    in_slot = []

    def write(written: LaunchState, _: Path) -> None:
        assert written.state == state
        in_slot.append(supervisor.names.page.read("launcher").state)

    monkeypatch.setattr(LaunchState, "write", write)
    supervisor._set_state(state)
    assert in_slot == [state if slot_is_first else "absent"]
    assert supervisor.names.page.read("launcher").state == state


@pytest.mark.parametrize(
    ("state", "num_signals", "has_failed"),
    [
        ("ready", 0, True),
        ("ready", 1, True),
        ("draining", 1, True),
        ("draining", 2, False),
        ("loading", 0, True),
        ("loading", 1, False),
    ],
)
def test_a_death_that_nobody_replaces_ends_a_launch_also_while_it_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, num_signals: int, has_failed: bool
) -> None:
    """What it held can never finish, so there is nothing to wait for."""
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, restart="never")) as supervisor:
        supervisor._set_state(state)
        supervisor._num_signals = num_signals
        monkeypatch.setattr(supervisor, "_reap", lambda child: -signal.SIGKILL)
        process: Any = SimpleNamespace(pid=1)
        supervisor._on_exit(Child(Place("detokenizer", 0, "detokenizer"), 1, process, -1, is_ready=True))
        assert (supervisor._failure is not None) == has_failed
