"""LongTexts: encodes texts in threads, tenants in turn: those that take the loop too long. A text that takes
seconds only delays others of that kind, and a medium one, of which there are many, only medium ones.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from runtime.base.errors import Overloaded
from runtime.ring.tenants import OWNER
from runtime.wire.format import IntArray
from runtime.wire.handle import client_of
from runtime.wire.messages import AbortRequest
from tokenizer_proc.arrivals import LONG_RETRY_S, rate_limited, share_of_chars
from tokenizer_proc.sequences import Job
from tokenizer_proc.turns import Turns
from tokenizer_proc.validation import PromptField

# Less than a second of work. Longer texts wait for each other.
MAX_SHORTER_CHARS = 1 << 20
MAX_MEDIUM_CHARS = 1 << 16
"""Maximum number of characters of a prompt that is never refused because of others that wait. Longer ones may
be.
"""
NUM_MEDIUM_THREADS = 2


@dataclass(slots=True, eq=False)
class LongPrompt:
    """A text prompt that a thread is encoding, or a conversation that it renders first."""

    job: Job
    prompt_field: PromptField
    num_chars: int
    """Number of characters of its text; for a conversation, without those that the template adds."""
    ids: Future[IntArray]
    is_medium: bool = False
    aborted: set[bytes] = field(default_factory=set)
    """Handles of its sequences whose abort has passed meanwhile. The abort is repeated behind the request."""


class LongTexts:
    """Long texts that wait or are being encoded. Used by the work loop only."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        """on_done: called in a thread when a text is encoded, or its encoding has failed."""
        self._medium = _FairThreads("medium-texts", NUM_MEDIUM_THREADS)
        self._shorter = _FairThreads("long-texts")
        self._longest = _FairThreads("longest-texts")
        self._on_done = on_done
        self._all: dict[LongPrompt, None] = {}
        """Texts that wait or are being encoded, in the order of arrival."""
        self._of_sequence: dict[bytes, LongPrompt] = {}
        self._num_chars: Counter[str] = Counter()
        self.total_chars = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[LongPrompt]:
        return iter(self._all)

    def num_chars(self, tenant: str) -> int:
        """Return how many characters of this tenant's long texts wait or are being encoded."""
        return self._num_chars[tenant]

    def check_room(self, job: Job, num_chars: int) -> None:
        """Raise RateLimited or Overloaded if num_chars more characters of the job's tenant would be too many.
        A single text may always wait, and so may the owner's texts that are submitted again after a restart.
        """
        tenant = job.request.tenant
        own = self.num_chars(tenant)
        limit = share_of_chars(own, self.total_chars, is_again=job.is_again)
        if not own or own + num_chars <= limit:
            return
        if tenant != OWNER:
            raise rate_limited(own)
        if not job.is_again:
            raise Overloaded(
                f"texts of {own} characters wait to be encoded; try a long one again later",
                retry_after_s=LONG_RETRY_S,
            )

    def add(
        self,
        job: Job,
        prompt_field: PromptField,
        num_chars: int,
        encode: Callable[[], IntArray],
        *,
        is_medium: bool = False,
        opens_template: bool = False,
    ) -> None:
        """Queue a text for a thread, which calls `encode`. is_medium: the text does not count as a long one.
        opens_template: use the thread that makes all calls of this kind.
        """
        tenant = job.request.tenant
        threads = self._shorter if opens_template or num_chars <= MAX_SHORTER_CHARS else self._longest
        if is_medium and not opens_template:
            threads = self._medium
        ids = threads.submit(tenant, max(num_chars, 1), encode)
        long = LongPrompt(job, prompt_field, num_chars, ids, is_medium)
        self._all[long] = None
        for handle in job.handles:
            self._of_sequence[handle] = long
        if not is_medium:
            self._num_chars[tenant] += num_chars
            self.total_chars += num_chars
        ids.add_done_callback(lambda _: self._on_done())

    def take_done(self) -> Iterator[LongPrompt]:
        """Remove and yield the texts that are encoded, or whose encoding has failed."""
        for long in [long for long in self if long.ids.done()]:
            del self._all[long]
            for handle in long.job.handles:
                if self._of_sequence.get(handle) is long:
                    del self._of_sequence[handle]
            if not long.is_medium:
                self._num_chars[long.job.request.tenant] -= long.num_chars
                self.total_chars -= long.num_chars
            yield long

    def mark_aborted(self, abort: AbortRequest) -> None:
        """Record an abort that passes a request which it may concern. A tenant cannot abort another's
        requests.
        """
        if abort.client:
            for long in self:
                if client_of(long.job.handles[0]) == abort.client and _may_end(abort, long):
                    long.aborted.update(long.job.handles)
        if self._of_sequence:
            for handle in abort.handles:
                found = self._of_sequence.get(handle)
                if found is not None and _may_end(abort, found):
                    found.aborted.add(handle)

    def close(self) -> None:
        for threads in (self._medium, self._shorter, self._longest):
            threads.close()


def _may_end(abort: AbortRequest, long: LongPrompt) -> bool:
    return abort.tenant in (OWNER, long.job.request.tenant)


class _FairThreads:
    """Threads, usually one, that do the work of tenants in turn."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._turns: Turns[tuple[Future[IntArray], Callable[[], IntArray]]] = Turns()

    def submit(self, tenant: str, cost: int, work: Callable[[], IntArray]) -> Future[IntArray]:
        future: Future[IntArray] = Future()
        with self._lock:
            self._turns.push(tenant, (future, work), cost)
        self._executor.submit(self._do_next)
        return future

    def _do_next(self) -> None:
        with self._lock:
            future, work = self._turns.pop()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
