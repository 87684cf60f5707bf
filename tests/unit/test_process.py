"""What a process leaves on the status page when it fails."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runtime.config import RuntimeConfig
from runtime.endpoints import Endpoints
from runtime.process import LaunchFile, ProcessContext
from runtime.status_page import StatusPage


def test_a_process_that_fails_leaves_what_it_said_last(tmp_path: Path) -> None:
    """The launcher reads there which sequence ran alone in an engine that has failed."""
    Endpoints(tmp_path).config_file.write_bytes(msgspec.json.encode(LaunchFile(RuntimeConfig(device="cpu"))))
    page = StatusPage(Endpoints(tmp_path).status_file, create=True)
    context = ProcessContext("scheduler", tmp_path, epoch=4)
    context.beat(force=True, solitary=b"s" * 16, num_running=1)
    context.failed("a step failed", 70)
    slot = page.read("scheduler")
    assert (slot.state, slot.epoch, slot.solitary, slot.num_running) == ("failed", 4, b"s" * 16, 1)
    context.close()
    page.close()
