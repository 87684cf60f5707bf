"""SentCount: how many sequences have been let through to the scheduler that is there now, by all tokenizers.

The scheduler counts what it has received and each tokenizer what it has sent, both since their own start; the
difference is on the way. When one of them has been replaced, the difference says nothing any more: part of it
died with it. It is then taken as nothing, which may admit a few too many; the scheduler refuses what is over
its own limit, exactly.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from runtime.wire.status_page import ProcessStatus


class SentCount:
    def __init__(
        self, num_sent_elsewhere: Callable[[], int], epochs_elsewhere: Callable[[], tuple[int, ...]]
    ) -> None:
        """Count for the other tokenizers: the sum of their `num_sent`, and their epochs."""
        self._num_sent_elsewhere = num_sent_elsewhere
        self._epochs_elsewhere = epochs_elsewhere
        self._epochs: tuple[int, ...] | None = None
        self._offset = 0

    def num_on_way(self, num_sent: int, scheduler: ProcessStatus) -> int:
        """Return how many the scheduler has not received yet. `num_sent`: by this tokenizer."""
        return max(0, self._total(num_sent, scheduler) - scheduler.num_received)

    def _total(self, num_sent: int, scheduler: ProcessStatus) -> int:
        """To be compared with the scheduler's `num_received`."""
        total = num_sent + self._num_sent_elsewhere()
        epochs = (scheduler.epoch, *self._epochs_elsewhere())
        if epochs != self._epochs:
            ahead = total - scheduler.num_received
            # In the place of one that died: the scheduler has received more than this one has sent.
            self._offset = min(0, ahead) if self._epochs is None else ahead
            self._epochs = epochs
        return total - self._offset


class OnWay:
    """Counts of what this tokenizer has let through, and whose it is. The scheduler receives in the order of
    sending, so what is still on the way is what was sent last.
    """

    def __init__(self) -> None:
        self.num_encoding = 0
        """Sequences whose prompts are being encoded."""
        self.num_passed_on = 0
        """Sequences sent to the scheduler since the start."""
        self._encoding: Counter[str] = Counter()
        self._sent: deque[tuple[str, int]] = deque()
        """Sequences that may not have been received: whose and how many, in the order of sending."""
        self._num_of: Counter[str] = Counter()
        self._num_sent = 0

    def begin(self, tenant: str, count: int) -> None:
        """Sequences of `tenant` are let through; their prompt is to be encoded."""
        self.num_encoding += count
        self._encoding[tenant] += count

    def end(self, tenant: str, count: int) -> None:
        """Their prompt is encoded, or cannot be."""
        self.num_encoding -= count
        self._encoding[tenant] -= count

    def pass_on(self, tenant: str, count: int) -> None:
        """Sequences of `tenant` are sent to the scheduler."""
        self.num_passed_on += count
        self._sent.append((tenant, count))
        self._num_of[tenant] += count
        self._num_sent += count

    def num_of(self, tenant: str, num_on_way: int) -> int:
        """Return how many of this tenant are on the way. `num_on_way`: by all tokenizers, of all tenants,
        with those that are being encoded. With several tokenizers some may be counted that have been
        received.
        """
        while self._num_sent > max(0, num_on_way - self.num_encoding):
            sender, count = self._sent.popleft()
            received = min(count, self._num_sent - max(0, num_on_way - self.num_encoding))
            if received < count:
                self._sent.appendleft((sender, count - received))
            self._num_of[sender] -= received
            self._num_sent -= received
        return self._num_of[tenant] + self._encoding[tenant]
