"""QueueAdmission: decides whether a request may go on to the scheduler, by the numbers of sequences that wait
there and that are on the way.

The scheduler counts the sequences that it has received, and each tokenizer those that it has sent, both since
their own start; the difference is on the way. When one of these processes was replaced the difference is
meaningless, because some messages died with it. It is then taken as 0, which may admit a few too many; the
scheduler refuses what exceeds its own limit, exactly.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from runtime.base.errors import Overloaded
from runtime.wire.handle import attempt_of
from runtime.wire.messages import GenerateRequest
from runtime.wire.status_page import ProcessStatus
from tokenizer_proc.validation import QueueBound

DRAIN_RETRY_S = 5.0
"""Seconds after which clients should try again at a server that is shutting down, so that its successor can
start.
"""


class SentCount:
    def __init__(
        self, num_sent_elsewhere: Callable[[], int], epochs_elsewhere: Callable[[], tuple[int, ...]]
    ) -> None:
        """num_sent_elsewhere: returns the sum of the other tokenizers' `num_sent`. epochs_elsewhere: returns
        their epochs.
        """
        self._num_sent_elsewhere = num_sent_elsewhere
        self._epochs_elsewhere = epochs_elsewhere
        self._epochs: tuple[int, ...] | None = None
        self._offset = 0

    def num_on_way(self, num_sent: int, scheduler: ProcessStatus) -> int:
        """Return how many sequences the scheduler has not received yet. num_sent: sent by this tokenizer."""
        return max(0, self._total(num_sent, scheduler) - scheduler.num_received)

    def _total(self, num_sent: int, scheduler: ProcessStatus) -> int:
        """Return the number to be compared with the scheduler's `num_received`."""
        total = num_sent + self._num_sent_elsewhere()
        epochs = (scheduler.epoch, *self._epochs_elsewhere())
        if epochs != self._epochs:
            ahead = total - scheduler.num_received
            # This process replaces one that died: the scheduler has received more than this one has sent.
            self._offset = min(0, ahead) if self._epochs is None else ahead
            self._epochs = epochs
        return total - self._offset


class OnWay:
    """Counts of the sequences that this tokenizer has admitted, by tenant. The scheduler receives in the
    order of sending, so the sequences still on the way are the last ones sent.
    """

    def __init__(self) -> None:
        self.num_encoding = 0
        """Number of sequences whose prompts are being encoded."""
        self.num_passed_on = 0
        """Number of sequences sent to the scheduler since the start."""
        self._encoding: Counter[str] = Counter()
        self._sent: deque[tuple[str, int]] = deque()
        """Tenants and counts of sequences that may not have been received, in the order of sending."""
        self._num_of: Counter[str] = Counter()
        self._num_sent = 0

    def begin(self, tenant: str, count: int) -> None:
        """Count admitted sequences of `tenant`, whose prompt is now to be encoded."""
        self.num_encoding += count
        self._encoding[tenant] += count

    def end(self, tenant: str, count: int) -> None:
        """Uncount sequences whose prompt is encoded, or cannot be."""
        self.num_encoding -= count
        self._encoding[tenant] -= count

    def pass_on(self, tenant: str, count: int) -> None:
        """Count sequences of `tenant` that are sent to the scheduler."""
        self.num_passed_on += count
        self._sent.append((tenant, count))
        self._num_of[tenant] += count
        self._num_sent += count

    def num_of(self, tenant: str, num_on_way: int) -> int:
        """Return how many of this tenant's sequences are on the way. num_on_way: of all tokenizers and
        tenants, those being encoded included. With several tokenizers the result may include some that were
        received already.
        """
        while self._num_sent > max(0, num_on_way - self.num_encoding):
            sender, count = self._sent.popleft()
            received = min(count, self._num_sent - max(0, num_on_way - self.num_encoding))
            if received < count:
                self._sent.appendleft((sender, count - received))
            self._num_of[sender] -= received
            self._num_sent -= received
        return self._num_of[tenant] + self._encoding[tenant]


class QueueAdmission:
    """Counts the sequences that this tokenizer admits, and refuses requests for which there is no room."""

    def __init__(
        self,
        bound: QueueBound,
        scheduler_status: Callable[[], ProcessStatus],
        *,
        num_sent_elsewhere: Callable[[], int] = lambda: 0,
        epochs_elsewhere: Callable[[], tuple[int, ...]] = tuple,
        is_draining: Callable[[], bool] = lambda: False,
        is_recovering: Callable[[], bool] = lambda: False,
        has_tenants: Callable[[], bool] = lambda: False,
    ) -> None:
        """Each argument but `bound` is a function.

        - num_sent_elsewhere: sum of the other tokenizers' `num_sent`. epochs_elsewhere: their epochs.
        - is_draining: True if new requests are refused because the launch ends. A resubmitted request is not
          new.
        - is_recovering: True if a process was replaced, or a client came back, so recently that requests may
          be submitted again. Otherwise a claim to be resubmitted is not believed.
        - has_tenants: True if several tenants share the launch.
        """
        self._bound = bound
        self._scheduler_status = scheduler_status
        self._sent_count = SentCount(num_sent_elsewhere, epochs_elsewhere)
        self._is_draining = is_draining
        self._is_recovering = is_recovering
        self._has_tenants = has_tenants
        self.on_way = OnWay()

    @property
    def num_sent(self) -> int:
        """Number of sequences admitted since the start: sent to the scheduler, or being encoded."""
        return self.on_way.num_passed_on + self.on_way.num_encoding

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of a sequence that the scheduler takes; 0: not known yet."""
        return self._scheduler_status().max_len

    def is_new(self, request: GenerateRequest) -> bool:
        """Return False for a request that is submitted again after a restart, which is not refused because it
        was accepted once.
        """
        return not (attempt_of(request.handle) and self._is_recovering())

    def check(self, request: GenerateRequest) -> None:
        """Check that there is room for a request. Raises Overloaded if there is none, or the
        server is shutting down.
        """
        if self._is_draining():
            raise Overloaded("the server is shutting down", code="shutting_down", retry_after_s=DRAIN_RETRY_S)
        status = self._scheduler_status()
        num_on_way = self._sent_count.num_on_way(self.num_sent, status)
        if self._has_tenants():
            num_on_way = self.on_way.num_of(request.tenant, num_on_way)
        self._bound.check(status, num_on_way, request.sampling.n, tenant=request.tenant)
