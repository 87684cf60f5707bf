"""Guides that are kept compiled, and the thread that compiles them in this process."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from grammar_proc.backend import Matcher
from grammar_proc.guides.guide_memory import GuideCopy, HeapMeter

MAX_READY = 256
"""Number of guides that are kept compiled."""
MAX_READY_CHARS = 1 << 21
"""Characters of the grammars that are kept compiled. Each takes 60 to 320 bytes of memory."""
MAX_TURNS = 256
"""Tenants whose turns are remembered."""
COMPILE_NICENESS = 10
"""Niceness of the thread that compiles guides again. Not the largest there is, because the thread may hold
the interpreter lock.
"""


def _give_way() -> None:
    """Lower the priority of this thread, so that it gets about a tenth of a processor that others want."""
    niceness = max(COMPILE_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))  # niceness may not be lowered
    os.setpriority(os.PRIO_PROCESS, 0, niceness)


class ReadyGuides:
    """Recently compiled guides, by their keys, limited in number and size."""

    def __init__(self) -> None:
        self._guides: OrderedDict[bytes, GuideCopy] = OrderedDict()
        self._num_chars: Counter[str] = Counter()
        """Characters of the grammars of each tenant."""

    def __len__(self) -> int:
        return len(self._guides)

    def get(self, key: bytes) -> GuideCopy | None:
        """Return a compiled guide; None if it is not kept."""
        if key not in self._guides:
            return None
        self._guides.move_to_end(key)
        return self._guides[key]

    def add(self, key: bytes, copy: GuideCopy) -> None:
        """Keep a compiled guide. Of the tenant with the most, in number or characters of grammars, the least
        recently used is dropped; the newest stays.
        """
        self.forget(key)
        self._guides[key] = copy
        self._num_chars[copy.tenant] += len(copy.grammar)
        while len(self._guides) > MAX_READY:
            self._drop_of(Counter(each.tenant for each in self._guides.values()), key)
        while self._num_chars.total() > MAX_READY_CHARS and len(self._guides) > 1:
            self._drop_of(self._num_chars, key)

    def forget(self, key: bytes, copy: GuideCopy | None = None) -> None:
        """Keep a guide no longer; with `copy`, only if it is this one."""
        if copy is not None and self._guides.get(key) is not copy:
            return
        gone = self._guides.pop(key, None)
        if gone is None:
            return
        self._num_chars[gone.tenant] -= len(gone.grammar)
        if not self._num_chars[gone.tenant]:
            del self._num_chars[gone.tenant]

    def forget_unused(self) -> None:
        """Keep only the guides that sequences follow."""
        for key in [key for key, copy in self._guides.items() if not copy.handles]:
            self.forget(key)

    def _drop_of(self, amounts: Counter[str], newest: bytes) -> None:
        """Drop the least recently used guide of the tenant with the largest amount that has another one than
        the newest.
        """
        most = max(amounts[each.tenant] for key, each in self._guides.items() if key != newest)
        key = next(
            key for key, each in self._guides.items() if key != newest and amounts[each.tenant] == most
        )
        self.forget(key)


class ToMake(NamedTuple):
    """Grammar that is to be compiled."""

    grammar: str
    tenant: str
    num_bytes: int
    """Bytes that it will take, as its child process has measured."""
    anew: bool = False
    """True if outputs follow it that have begun."""


class GuideMaker:
    """Compiles grammars in a thread, one after the other. Tenants take turns."""

    def __init__(self, compile_grammar: Callable[[str, bool], Matcher], meter: HeapMeter) -> None:
        self._compile = compile_grammar
        self._meter = meter
        self._thread = ThreadPoolExecutor(1, "compile", initializer=_give_way)
        self._waiting: dict[bytes, ToMake] = {}
        self._turns: dict[str, int] = {}
        """Number of each tenant's last turn."""
        self._turn = 0
        self._made: tuple[bytes, ToMake, Future[Matcher]] | None = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting or (self._made is not None and self._made[0] == key)

    @property
    def file(self) -> int:
        """File descriptor that becomes readable when a guide has been compiled."""
        return self._bell

    def make(self, key: bytes, grammar: ToMake) -> None:
        self._waiting[key] = grammar
        self._begin()

    def cancel(self, key: bytes) -> None:
        """Compile a grammar no more for which nobody waits."""
        self._waiting.pop(key, None)

    def done(self) -> Iterator[tuple[bytes, GuideCopy]]:
        """Yield what has been compiled since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if self._made is not None and self._made[2].done():
            key, grammar, made = self._made
            self._made = None
            self._meter.read(now=True)  # what it has taken is laid to nobody else
            self._meter.is_there(key)
            self._begin()
            yield (
                key,
                GuideCopy(
                    made.result(), grammar.grammar, grammar.tenant, grammar.num_bytes, grammar.num_bytes
                ),
            )

    def _begin(self) -> None:
        if self._made is not None or not self._waiting:
            return
        key = min(self._waiting, key=lambda each: self._turns.get(self._waiting[each].tenant, 0))
        grammar = self._waiting.pop(key)
        self._turn += 1
        self._turns[grammar.tenant] = self._turn
        if len(self._turns) > MAX_TURNS:
            del self._turns[min(self._turns, key=lambda each: self._turns[each])]
        self._meter.expect(key, grammar.num_bytes)
        made = self._thread.submit(self._compile, grammar.grammar, grammar.anew)
        self._made = (key, grammar, made)
        made.add_done_callback(lambda _: os.eventfd_write(self._bell, 1))

    def close(self) -> None:
        self._thread.shutdown(wait=False)
        os.close(self._bell)
