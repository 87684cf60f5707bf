"""NotedTurns: turns of an event loop in which a method is called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


class NotedTurns:
    """Notes of the calls of one method, all in the same event loop, which may be another thread's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.calls: list[int] = []
        """The turn of each call, from `hold` on; before it 0."""
        self.is_over = False
        self._turn = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        method = getattr(owner, name)

        def noted(*given: Any, **named: Any) -> Any:
            self._loop = asyncio.get_running_loop()
            self.calls.append(self._turn)
            return method(*given, **named)

        monkeypatch.setattr(owner, name, noted)

    def hold(self, seconds: float) -> None:
        """Hold up the loop, in which the method has been called before, for so long from now on."""
        for call in (self._count, partial(time.sleep, seconds)):
            self._call(call)

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    def _count(self) -> None:
        self._turn += 1
        if not self.is_over:
            self._call(self._count)
