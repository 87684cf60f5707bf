"""In which order a launch says how it is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.config import RuntimeConfig
from runtime.launch_state import LaunchState
from runtime.supervisor import Supervisor


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """Of a launch that has started no process yet."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    supervisor = Supervisor(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True))
    yield supervisor
    supervisor.names.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
