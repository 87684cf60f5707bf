"""GuideCompiler: tries guides in child processes, a few at a time, kills those that take too long, and
remembers refusals.

    begin(guide) ──► waiting (8 of a tenant) ──► a child, 3 s at most ──► grammar or refusal

Tenants take turns. There are as many children as processors, less one. A child whose guide takes longer than
most guides do continues only while no other process needs the processor, and is replaced afterwards. It is in
the way of its own tenant's guides only: others get a further child meanwhile. After it is killed, it may take
long to end; nobody waits for that, but there are never more than twice as many processes as children.
"""

from __future__ import annotations

import hashlib
import os
import select
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from grammar_proc.children import CompileChild, Nursery
from grammar_proc.compile_child import Compiled
from runtime.base.errors import InvalidRequest, Overloaded
from runtime.wire.error_info import error_info
from runtime.wire.guide import Guide
from runtime.wire.messages import ErrorInfo

MAX_COMPILE_S = 3.0
MIN_CPU_S = MAX_COMPILE_S / 2
"""A guide that takes MAX_COMPILE_S with less CPU time than this is not called too large: it had too little of
the processor.
"""
MAX_WAIT_S = 30.0
"""Maximum number of seconds for which a guide waits for a child."""
MAX_START_S = 60.0
RESTART_S = 1.0
"""Seconds between a child that could not start and the next attempt."""
MOMENT_S = 0.2
"""Seconds that a guide has to finish after it was cancelled."""
FAIR_CPU_S = 0.03
"""CPU seconds of each guide at normal priority."""
MAX_CREDIT_S = 0.3
CREDIT_SHARE = 0.02
"""Share of one processor that all guides together get beyond FAIR_CPU_S, and at most MAX_CREDIT_S at once."""
MAX_WAITING = 8
"""Guides of one tenant that wait for a child."""
MAX_WAITING_OF_ALL = 64
"""The same for all tenants together. A tenant without waiting guides is always let in."""
MAX_REMEMBERED = 256
MAX_CHILDREN = 8
RETRY_AFTER_S = 1.0


def key_of(guide: Guide, tenant: str = "") -> bytes:
    """Return the key of a tenant's guide, by which a process remembers it: the same for equal guides of one
    tenant. Two tenants share none, because the time it takes would tell the one what the other has asked.
    """
    return hashlib.blake2b(msgspec.msgpack.encode((tenant, guide)), digest_size=16).digest()


class _Waiting(NamedTuple):
    """Guide that waits for a child, and since when."""

    guide: Guide
    tenant: str
    since: float


class _Credit:
    """CPU time at normal priority that all guides share, beyond FAIR_CPU_S of each."""

    def __init__(self) -> None:
        self._left_s = MAX_CREDIT_S
        self._since = time.monotonic()

    def take(self, seconds: float, now: float) -> bool:
        """Use some of the credit. Returns False if there is too little; nothing is used then."""
        self._left_s = min(MAX_CREDIT_S, self._left_s + CREDIT_SHARE * (now - self._since))
        self._since = now
        if self._left_s < seconds:
            return False
        self._left_s -= seconds
        return True


class GuideCompiler:
    """Tries guides in children, and remembers refusals. Not thread-safe."""

    def __init__(self, tokenizer: str, num_children: int = 0, *, backend: str = "llguidance") -> None:
        """`tokenizer` is the directory of a tokenizer. `num_children` 0: as many as there are processors,
        less one.
        """
        most = num_children or max(1, len(os.sched_getaffinity(0)) - 1)
        self._max_children = min(most, MAX_CHILDREN)
        self._nursery = Nursery(tokenizer, backend)
        self._children = [self._nursery.child()]
        self._credit = _Credit()
        self._ending: list[CompileChild] = []
        """Children that were killed and have not ended yet."""
        self._died: set[bytes] = set()
        """Guides whose child died, and that are tried a second time."""
        self._start_after = 0.0
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        """Waiting guides by key, in the order of arrival."""
        self._turns: dict[str, int] = {}
        """Number of the turn in which each tenant with waiting guides had its last one tried."""
        self._turn = 0
        self._refused: OrderedDict[bytes, ErrorInfo] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        """Return True if a guide is being tried or waits for it."""
        return bool(self._waiting) or any(child.key is not None for child in self._children)

    @property
    def files(self) -> list[int]:
        """Return the file descriptors that become readable when there is news."""
        return [child.fileno() for child in self._children]

    def wait_for_child(self) -> None:
        """Wait until a child can try guides, or until starting one has taken too long."""
        deadline = time.monotonic() + MAX_START_S
        while not any(child.is_ready for child in self._children) and time.monotonic() < deadline:
            select.select(self.files, [], [], RESTART_S)
            for _ in self.poll():
                pass

    def refusal(self, key: bytes) -> ErrorInfo | None:
        """Return the error with which a guide was refused, if that is remembered."""
        if key in self._refused:
            self._refused.move_to_end(key)
        return self._refused.get(key)

    def begin(self, key: bytes, guide: Guide, tenant: str = "") -> None:
        """Have a guide of a tenant tried, unless it is being tried or waits already. Raises Overloaded if too
        many wait.
        """
        for child in self._children:
            if child.key == key:
                child.is_wanted = True
                return
        if key in self._waiting:
            return
        # A guide for which a child is free, or can be started, does not wait for others.
        num_own = sum(each.tenant == tenant for each in self._waiting.values())
        num_idle = self._max_children - self._num_in_the_way(tenant)
        if num_own - num_idle >= MAX_WAITING or (num_own and len(self._waiting) >= MAX_WAITING_OF_ALL):
            raise _overloaded(f"{num_own} guides wait to be compiled already")
        self._waiting[key] = _Waiting(guide, tenant, time.monotonic())
        self._hand_out()

    def cancel(self, key: bytes) -> None:
        """Cancel a guide for which no request waits any more."""
        self._waiting.pop(key, None)
        self._died.discard(key)
        for child in self._children:
            if child.key == key:
                child.is_wanted = False  # it finishes within MOMENT_S, or is killed

    def poll(self) -> Iterator[tuple[bytes, Compiled]]:
        """Yield the results since the last call, kill children that take too long, and give waiting guides to
        free ones.
        """
        now = time.monotonic()
        for child in [child for child in self._ending if child.has_ended]:
            child.forget()
            self._ending.remove(child)
        for child in list(self._children):
            child.pump()
            key = child.key
            done = self._look(child, now)
            if done is not None and key is not None:
                self._died.discard(key)
                self._remember(key, done)
                yield key, done
        while self._waiting and now - next(iter(self._waiting.values())).since >= MAX_WAIT_S:
            key, _ = self._waiting.popitem(last=False)
            self._died.discard(key)
            yield key, _not_now(f"no process to compile it was free within {MAX_WAIT_S:g} s")
        self._hand_out()

    def _look(self, child: CompileChild, now: float) -> Compiled | None:
        """Return the result of a child's guide, if there is one: its answer, or the error if it takes too
        long or has died.
        """
        try:
            data = child.answer()
            if data is not None and not child.is_ready:
                child.meet(data)
                return None
        except EOFError:
            if not child.is_ready:
                self._start_after = now + RESTART_S
            self._drop(child)
            return self._died_of(child, now)
        if data is not None:
            child.key = None
            if child.is_demoted:
                self._drop(child)
            return msgspec.msgpack.decode(data, type=Compiled)
        busy_s = now - child.since
        if child.key is None:
            if not child.is_ready and busy_s >= MAX_START_S:
                self._nursery.close()
                self._drop(child)
        elif busy_s >= MAX_COMPILE_S:
            cpu_s = child.cpu_s
            self._drop(child)
            if cpu_s < MIN_CPU_S:
                return _not_now(f"no processor was free to compile it within {MAX_COMPILE_S:g} s")
            return _too_much(f"it takes more than {MAX_COMPILE_S:g} s to compile")
        elif busy_s >= MOMENT_S and not child.is_wanted:
            self._drop(child)
        elif not child.is_demoted:
            self._charge(child, now)
        return None

    def _died_of(self, child: CompileChild, now: float) -> Compiled | None:
        """Try the guide of a dead child once more: the child may have died with its nursery, or because
        others took the memory. Returns the refusal if it was the second time.
        """
        key, guide = child.key, child.guide
        if key is None or guide is None or not child.is_wanted:
            return None
        if key in self._died:
            self._died.discard(key)
            return _too_much("it takes too much memory to compile")
        self._died.add(key)
        self._waiting[key] = _Waiting(guide, child.tenant, now)
        self._waiting.move_to_end(key, last=False)
        return None

    def _charge(self, child: CompileChild, now: float) -> None:
        """Charge a child's CPU time beyond FAIR_CPU_S to the shared credit; demote it if there is
        too little.
        """
        seconds = child.cpu_s - FAIR_CPU_S - child.charged_s
        if seconds > 0.0:
            if self._credit.take(seconds, now):
                child.charged_s += seconds
            else:
                child.demote()

    def _drop(self, child: CompileChild) -> None:
        child.kill()
        self._children.remove(child)
        self._ending.append(child)

    def _hand_out(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.is_ready and child.key is None:
                key = self._next_key()
                if key is None:
                    break
                each = self._waiting.pop(key)
                self._note_turn(each.tenant)
                child.give(key, each.guide, each.tenant, now)
        num_busy = sum(child.key is not None and not child.is_demoted for child in self._children)
        counts = Counter(each.tenant for each in self._waiting.values())
        num_startable = sum(
            min(count, self._max_children - self._num_in_the_way(tenant)) for tenant, count in counts.items()
        )
        num_startable = min(num_startable, self._max_children - num_busy)
        num_starting = sum(not child.is_ready for child in self._children)
        if self._children and num_startable <= num_starting:
            return
        num_processes = len(self._children) + len(self._ending)
        if num_processes < 2 * self._max_children and now >= self._start_after:
            self._children.append(self._nursery.child())

    def _num_in_the_way(self, tenant: str) -> int:
        """Return the number of children that are busy and because of which a tenant's guides wait. Those that
        have given way to everybody else are in the way of their own tenant only.
        """
        return sum(
            child.key is not None and (not child.is_demoted or child.tenant == tenant)
            for child in self._children
        )

    def _next_key(self) -> bytes | None:
        """Return the key of the guide whose turn it is: the oldest of the tenant whose last turn is the
        longest ago. None: no guide waits that may be tried now.
        """
        may_go = {
            tenant: self._num_in_the_way(tenant) < self._max_children
            for tenant in {each.tenant for each in self._waiting.values()}
        }
        keys = [key for key, each in self._waiting.items() if may_go[each.tenant]]
        return min(keys, key=lambda key: self._turns.get(self._waiting[key].tenant, 0), default=None)

    def _note_turn(self, tenant: str) -> None:
        self._turn += 1
        self._turns[tenant] = self._turn
        if len(self._turns) > MAX_WAITING_OF_ALL:
            del self._turns[min(self._turns, key=lambda each: self._turns[each])]

    def _remember(self, key: bytes, result: Compiled) -> None:
        if result.error is not None and result.error.status == InvalidRequest.status:
            self._refused[key] = result.error
            while len(self._refused) > MAX_REMEMBERED:
                self._refused.popitem(last=False)

    def close(self) -> None:
        for child in list(self._children):
            self._drop(child)
        self._nursery.close()
        for child in self._ending:
            child.forget()


def _overloaded(why: str) -> Overloaded:
    return Overloaded(
        f"the guide: {why}; try again later", code="too_many_guides", retry_after_s=RETRY_AFTER_S
    )


def _not_now(why: str) -> Compiled:
    return Compiled(error=error_info(_overloaded(why)))


def _too_much(why: str) -> Compiled:
    error = InvalidRequest(f"the guide is too large: {why}", code="guide_too_large")
    return Compiled(error=error_info(error))
