"""Load: callers that still get something are waited for, however slow the machine is; others are found."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.faults import load as load_module
from tests.faults.load import Load

NUM_PIECES = 3


def ended(load: Load, callers: threading.Thread) -> None:
    load._thread = callers
    callers.start()
    load.__exit__()


def test_callers_that_still_get_something_are_waited_for() -> None:
    load, joined = Load(Path(), "", num_streams=0, num_http=0, num_plain=0), threading.Semaphore(0)

    class Callers(threading.Thread):
        def run(self) -> None:
            for _ in range(NUM_PIECES):
                joined.acquire()
                load._note_gap(0.0)

        def join(self, timeout: float | None = None) -> None:
            """Return when they have got one more piece, though they have not ended, as after `timeout`."""
            before = load.account.num_pieces
            joined.release()
            while load.account.num_pieces == before and self.is_alive():
                pass

    ended(load, Callers(daemon=True))
    assert load.account.num_pieces == NUM_PIECES


def test_a_caller_that_gets_nothing_more_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "SILENT_S", 0.01)
    never = threading.Event()
    load = Load(Path(), "", num_streams=0, num_http=0, num_plain=0)
    with pytest.raises(AssertionError, match="waits for ever"):
        ended(load, threading.Thread(target=never.wait, daemon=True))
    never.set()
