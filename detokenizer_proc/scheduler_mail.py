"""SchedulerMail: messages to the scheduler, kept while it has no room. Never waits."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.wire.handle import MAX_ABORT_HANDLES
from runtime.wire.messages import AbortRequest, StopMatched
from runtime.wire.outbox import KeepingOutbox


class SchedulerMail(KeepingOutbox[AbortRequest | StopMatched]):
    def abort(self, handles: Sequence[bytes]) -> None:
        for start in range(0, len(handles), MAX_ABORT_HANDLES):
            self.add(AbortRequest(tuple(handles[start : start + MAX_ABORT_HANDLES])))

    def tell_matched(self, handle: bytes, num_tokens: int) -> None:
        """Tell the scheduler that output token number `num_tokens` completed a stop string."""
        self.add(StopMatched(handle, num_tokens))
