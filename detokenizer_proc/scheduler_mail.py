"""SchedulerMail: what this process has to tell the scheduler, kept while that has no room. Never waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from runtime.wire.format import Message
from runtime.wire.handle import MAX_ABORT_HANDLES
from runtime.wire.messages import AbortRequest, StopMatched
from runtime.wire.transport import Outbox


class SchedulerMail:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._kept: deque[Message] = deque()

    def __bool__(self) -> bool:
        """Whether something waits for room."""
        return bool(self._kept)

    def abort(self, handles: Sequence[bytes]) -> None:
        for start in range(0, len(handles), MAX_ABORT_HANDLES):
            self._kept.append(AbortRequest(tuple(handles[start : start + MAX_ABORT_HANDLES])))

    def tell_matched(self, handle: bytes, num_tokens: int) -> None:
        """A stop string was completed by so many output tokens."""
        self._kept.append(StopMatched(handle, num_tokens))

    def flush(self) -> None:
        while self._kept and self._outbox.send(self._kept[0]):
            self._kept.popleft()
