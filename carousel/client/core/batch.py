"""CompletionBatch: many prompts of one call, with as many in flight as the server accepts. Knows no socket.
All requests share one queue, so whichever ends first makes room for the next one. Of a finished request only
its completion is kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from carousel.client.core.mailbox import Item
from carousel.client.core.puts import put
from carousel.client.core.request.submission import Submission
from carousel.client.core.result import Completion
from carousel.client.core.session import Session
from carousel.client.core.state.request_state import RequestState
from runtime.base.errors import Overloaded

# Interval at which a batch that found no room on the way to the server tries again: far below the time of one
# forward step of a loaded server.
ROOM_POLL_S = 0.005
MAX_IN_FLIGHT = 4096
"""Maximum number of sequences in flight. Arbitrary: enough for any server, and their prompts fit into memory.
"""


class CompletionBatch:
    """Many prompts of one call. Used by one thread, for one `run`."""

    def __init__(
        self,
        session: Session[Any],
        submissions: Sequence[Submission],
        deadline: float | None,
        on_completion: Callable[[Completion], None],
    ) -> None:
        self._session = session
        self._submissions = submissions
        self._deadline = deadline
        self._on_completion = on_completion
        self._queue: SimpleQueue[tuple[int, Item]] = SimpleQueue()
        self._waiting = deque(range(len(submissions)))
        self._open: dict[int, RequestState] = {}
        self._num_in_flight = 0
        self._next_open_at = 0.0
        self._completions: dict[int, Completion] = {}

    def run(self) -> list[Completion]:
        """Return the completions in the order of the prompts. A request that the server refuses because
        others fill its queue is tried again; any other error ends the batch and aborts the rest. Raises
        RequestError, RingClosed, TimeoutError.
        """
        for submission in self._submissions[:1]:  # all have the same options
            put(self._session, submission, self._deadline)
        max_in_flight = min(self._session.max_in_flight(), MAX_IN_FLIGHT)
        try:
            while self._waiting or self._open:
                # One clock reading for both, so that `_receive` wakes up for what `_has_room` postpones.
                now = time.monotonic()
                while self._waiting and self._has_room(max_in_flight, now):
                    self._submit_next(now)
                self._receive(now)
        finally:
            for state in self._open.values():
                self._session.forget(state.number)
        return [self._completions[number] for number in range(len(self._submissions))]

    def _has_room(self, max_in_flight: int, now: float) -> bool:
        """Return True if one more request may be in flight. A request larger than the limit goes alone."""
        if now < self._next_open_at:
            return False
        num_after = self._num_in_flight + self._submissions[self._waiting[0]].num_sequences
        if self._open and num_after > max_in_flight:
            return False
        connection = self._session.connection
        if not connection.has_room and connection.error is None:
            self._next_open_at = now + ROOM_POLL_S
            return False
        return True

    def _submit_next(self, now: float) -> None:
        number = self._waiting[0]
        put = self._queue.put
        try:
            state = self._session.submit(self._submissions[number], lambda item: put((number, item)))
        except Overloaded:  # another thread has taken the room
            self._next_open_at = now + ROOM_POLL_S
            return
        self._waiting.popleft()
        self._open[number] = state
        self._num_in_flight += len(state.sequences)

    def _receive(self, now: float) -> None:
        """Wait until output has arrived, or a request may be submitted again."""
        wake_at = self._deadline
        if self._waiting and self._next_open_at > now:
            wake_at = self._next_open_at if wake_at is None else min(wake_at, self._next_open_at)
        try:
            number, item = self._queue.get(
                timeout=None if wake_at is None else max(0.0, wake_at - time.monotonic())
            )
        except Empty:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise TimeoutError("the time limit of the call is over") from None
            return
        state = self._open.get(number)
        if state is None:
            return  # news after an error of its request
        state.receive([item])
        if isinstance(state.error, Overloaded):
            self._close(number)
            self._waiting.appendleft(number)
            self._next_open_at = time.monotonic() + state.error.retry_after_s
            return
        state.check()
        if state.ended:
            self._close(number)
            completion = self._completions[number] = state.completion()
            self._on_completion(completion)

    def _close(self, number: int) -> None:
        self._num_in_flight -= len(self._open.pop(number).sequences)
