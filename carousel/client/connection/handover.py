"""Handover: bounds the output that a client's I/O thread has read and its event loop has not passed on."""

from __future__ import annotations

from collections.abc import Callable

from carousel.client.core.mailbox import HandedOver

MAX_BYTES = 4 << 20
"""Number of bytes from which on the I/O thread reads no more."""
NOTED_BYTES = 64 << 10
"""Number of bytes of messages behind which there is a note. Single steps bring fewer."""


class Handover:
    """Bytes of messages on their way from the I/O thread to those who wait for them.

    Nobody else bounds them. A loop that has much to do falls behind the thread, and what the ring has sent
    would gather in this process, in its form on the wire, as objects, and in the callers' mailboxes.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when the I/O thread may read again."""
        self._wake = wake
        self._num_unnoted = 0
        # Each is changed in one thread only.
        self._num_given = 0
        self._num_done = 0

    @property
    def is_full(self) -> bool:
        return self._num_given - self._num_done >= MAX_BYTES

    def add(self, num_bytes: int) -> HandedOver | None:
        """Count messages that were handed over. Returns a note to hand over behind them, if it is time for
        one.
        """
        self._num_unnoted += num_bytes
        if self._num_unnoted < NOTED_BYTES:
            return None
        note = HandedOver(self._num_unnoted, self._give_back)
        self._num_given += self._num_unnoted
        self._num_unnoted = 0
        return note

    def _give_back(self, num_bytes: int) -> None:
        self._num_done += num_bytes
        # Counted back from what is left, because the I/O thread may have added to it just now.
        num_left = self._num_given - self._num_done
        if num_left < MAX_BYTES <= num_left + num_bytes:
            self._wake()
