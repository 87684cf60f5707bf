"""NotedTurns: turns of an event loop in which a method is called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.harness.ring.fake_ring import WAIT_S


class NotedTurns:
    """Notes of the calls of one method, all in the same event loop, which may be another thread's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.calls: list[int] = []
        """The turn of each call, from `held` on; before it 0."""
        self.is_over = False
        self._turn = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        method = getattr(owner, name)

        def noted(*given: Any, **named: Any) -> Any:
            self._loop = asyncio.get_running_loop()
            self.calls.append(self._turn)
            return method(*given, **named)

        monkeypatch.setattr(owner, name, noted)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold up the loop, in which the method has been called before, in the block."""
        is_held, may_go_on = threading.Event(), threading.Event()

        def hold() -> None:
            is_held.set()
            may_go_on.wait(WAIT_S)

        self.call(self._count)
        self.call(hold)
        assert is_held.wait(WAIT_S), "the loop takes no turn"
        try:
            yield
        finally:
            may_go_on.set()

    def call(self, function: Callable[[], None]) -> None:
        """Have the loop call a function."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    def _count(self) -> None:
        self._turn += 1
        if not self.is_over:
            self.call(self._count)
