"""Callers that come all at once, and leave again, at the HTTP server over a fake ring."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from carousel.client.core.request.submission import Submission
from carousel.client.core.session import Session
from carousel.server.tenancy.entrance import LEAST_BYTES, TURN_BYTES
from tests.harness.http.http_front import http_front, raw_request
from tests.harness.ring.fake_ring import WAIT_S

NUM_CALLERS = 300
MAX_BEGUN = 6 * TURN_BYTES // LEAST_BYTES
"""It takes a few turns of the event loop until a request is begun."""


@pytest.mark.parametrize("were_connected", [False, True])
def test_of_a_crowd_that_leaves_only_those_are_begun_that_were_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, were_connected: bool
) -> None:
    submit = Session.submit
    all_are_there = threading.Event()
    begun: list[str] = []

    def watched(self: Any, submission: Submission, *arguments: Any) -> Any:
        if not begun:
            assert all_are_there.wait(WAIT_S)  # the event loop meets all others at once
        elif len(begun) == 1:
            for connection in crowd:
                connection.close()
        begun.append(str(submission.prompt))
        return submit(self, submission, *arguments)

    with http_front(tmp_path) as front, ExitStack() as stack:
        monkeypatch.setattr(Session, "submit", watched)
        crowd = [stack.enter_context(front.connect()) for _ in range(NUM_CALLERS * were_connected)]
        if were_connected:
            assert front.http.get("/live").status_code == 200, "all have been accepted"
        stack.enter_context(front.open_raw("/v1/completions", prompt="first"))
        crowd += [stack.enter_context(front.connect()) for _ in range(NUM_CALLERS - len(crowd))]
        for connection in crowd:
            connection.sendall(raw_request("/v1/completions", prompt="crowd"))
        all_are_there.set()
        front.ring.wait_for(lambda: len(front.ring.aborted()) == len(begun) - 1 > 0)
        stack.enter_context(front.open_raw("/v1/completions", prompt="last"))
        front.ring.wait_for(lambda: "last" in begun)
        assert 2 < len(begun) <= MAX_BEGUN, "first, last and some of the crowd"
