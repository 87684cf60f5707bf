"""RingStatus from the status page: the state of a ring's processes, for its clients."""

from __future__ import annotations

from runtime.wire.status_page import ProcessState, RingStatus, StatusPage

CANNOT_SERVE = ("loading", "failed", "restarting")
"""States of a process that is being restarted, or is about to be."""


def ring_status(page: StatusPage) -> RingStatus:
    load, launcher = page.read("scheduler"), page.read("launcher")
    return RingStatus(
        launcher.state,
        load.num_running,
        load.num_waiting,
        load.num_free_pages,
        _process_state(page, "scheduler", 0),
        tuple(_process_state(page, "tokenizer", i) for i in range(page.counts["tokenizer"])),
        tuple(_process_state(page, "detokenizer", i) for i in range(page.counts["detokenizer"])),
    )


def _process_state(page: StatusPage, role: str, index: int) -> ProcessState:
    status = page.read(role, index)
    return ProcessState(status.epoch, status.state not in CANNOT_SERVE)
