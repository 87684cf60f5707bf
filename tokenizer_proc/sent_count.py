"""SentCount: how many sequences have been let through to the scheduler that is there now, by all tokenizers.

The scheduler counts what it has received and each tokenizer what it has sent, both since their own start; the
difference is on the way. When one of them has been replaced, the difference says nothing any more: part of it
died with it. It is then taken as nothing, which may admit a few too many; the scheduler refuses what is over
its own limit, exactly.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.wire.status_page import Status


class SentCount:
    def __init__(
        self, num_sent_elsewhere: Callable[[], int], epochs_elsewhere: Callable[[], tuple[int, ...]]
    ) -> None:
        """Of the other tokenizers: the sum of their `num_sent`, and their epochs."""
        self._num_sent_elsewhere = num_sent_elsewhere
        self._epochs_elsewhere = epochs_elsewhere
        self._epochs: tuple[int, ...] | None = None
        self._offset = 0

    def total(self, num_sent: int, scheduler: Status) -> int:
        """To be compared with the scheduler's `num_received`. `num_sent`: by this tokenizer."""
        total = num_sent + self._num_sent_elsewhere()
        epochs = (scheduler.epoch, *self._epochs_elsewhere())
        if epochs != self._epochs:
            ahead = total - scheduler.num_received
            # In the place of one that died: the scheduler has received more than this one has sent.
            self._offset = min(0, ahead) if self._epochs is None else ahead
            self._epochs = epochs
        return total - self._offset
