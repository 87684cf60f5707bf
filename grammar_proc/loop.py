"""The grammar process's work loop: receives guides and token ids, and sends masks.

A guide is tried in a child process, compiled again in this process by a thread, and copied for each sequence
that uses it. A guide that was refused is refused at once the next time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from msgspec.structs import replace

from grammar_proc.backend import BackendVocabulary, Matcher
from grammar_proc.branches import Branches
from grammar_proc.compile_child import Compiled
from grammar_proc.compiler import GuideCompiler, ReadyGuides, key_of
from grammar_proc.matchers import GuideBroken, MaskPlace, Matchers
from grammar_proc.vocabulary import reason_of
from runtime.base.errors import InvalidRequest, RequestError
from runtime.base.mask_memory import MaskMemory
from runtime.wire.error_info import error_info
from runtime.wire.format import Message
from runtime.wire.guide import MatcherState
from runtime.wire.hypotheses import BranchMatchers
from runtime.wire.messages import (
    AdvanceMatchers,
    CloseMatcher,
    ErrorInfo,
    ForgetMatchers,
    GrammarStarted,
    GuideRefused,
    MatcherStates,
    OpenMatcher,
    ToGrammar,
)
from runtime.wire.outbox import KeepingOutbox
from runtime.wire.transport import Inbox, Outbox

MAX_DRAIN = 256
MAX_STATES = 64
"""Maximum number of states in one message, so that the first ones need not wait for the last."""
BUSY_WAIT_S = 0.02
TELL_S = 0.025
"""Seconds after which what has arrived meanwhile is looked at before further masks are made: it may be from a
tenant whose turn it is.
"""
COMPILE_NICENESS = 10
"""Niceness of the thread that compiles guides again. Not the largest there is, because the thread may hold
the interpreter lock.
"""


def _give_way() -> None:
    """Lower the priority of this thread, so that it gets about a tenth of a processor that others want."""
    niceness = max(COMPILE_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))  # niceness may not be lowered
    os.setpriority(os.PRIO_PROCESS, 0, niceness)


class GrammarLoop:
    """Work loop of the grammar process. `turn` is called whenever something can be read."""

    def __init__(
        self,
        inbox: Inbox,
        scheduler: Outbox,
        masks_out: Outbox,
        vocabulary: BackendVocabulary[Any],
        compiler: GuideCompiler,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`scheduler` receives refusals, and `masks_out` the masks. `on_progress` is called in a turn that
        may take long.
        """
        self._inbox = inbox
        self._scheduler = KeepingOutbox[Message](scheduler.send)
        self._masks_out = KeepingOutbox[Message](masks_out.send)
        self._vocabulary = vocabulary
        self._compiler = compiler
        self._matchers = Matchers(vocabulary, on_progress)
        self._branches = Branches(vocabulary, on_progress)
        self._ready = ReadyGuides()
        self._waits: dict[bytes, dict[bytes, OpenMatcher]] = {}
        """Sequences that wait for a guide: handle to message, by the guide's key."""
        self._waiting_for: dict[bytes, bytes] = {}
        """Key of the guide for which a sequence waits."""
        self._guide_of: dict[bytes, bytes] = {}
        """Key of the guide of each sequence."""
        self._thread = ThreadPoolExecutor(1, "compile", initializer=_give_way)
        self._made: dict[bytes, tuple[Future[Matcher], int, str]] = {}
        """Guides that the thread compiles, each with the length of its grammar and its tenant."""
        self._memory: MaskMemory | None = None
        """Memory of the scheduler in which masks are written."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._masks_out.send(GrammarStarted())

    @property
    def files(self) -> list[int]:
        """Return the file descriptors, besides the inbox, that become readable when there is something
        to do.
        """
        return [self._bell, *self._compiler.files]

    @property
    def num_matchers(self) -> int:
        return len(self._matchers)

    def turn(self) -> float:
        """Do all pending work. Returns the seconds after which to call it again if nothing arrives."""
        for message in self._inbox.drain(MAX_DRAIN):
            self._receive(message)
        for key, compiled in self._compiler.poll():
            self._take(key, compiled)
        self._take_made()
        began = time.monotonic()
        while self._matchers.has_news and time.monotonic() - began < TELL_S:
            self._tell(MAX_STATES)
        self._ready.forget_if_large()
        is_clear = self._scheduler.flush() and self._masks_out.flush()
        if self._matchers.has_news:
            return 0.0
        return BUSY_WAIT_S if self._compiler.is_busy or not is_clear else 1.0

    def _receive(self, message: ToGrammar) -> None:
        if isinstance(message, AdvanceMatchers):
            for news in message.entries:
                self._matchers.advance(news)
        elif isinstance(message, OpenMatcher):
            self._open(message)
        elif isinstance(message, CloseMatcher):
            self._close(message.handle)
        elif isinstance(message, BranchMatchers):
            self._branch(message)
        elif isinstance(message, ForgetMatchers):
            self._matchers.clear()
            self._branches.clear()
            self._memory = None
            for handle in list(self._guide_of):
                self._close(handle)

    # -- guides ---------------------------------------------------------------------------------------------

    def _open(self, message: OpenMatcher) -> None:
        self._close(message.handle)
        key = self._guide_of[message.handle] = key_of(message.guide, message.tenant)
        start = self._ready.get(key)
        if start is not None:
            self._begin(message, start)
            return
        refusal = self._compiler.refusal(key)
        if refusal is not None:
            self._refuse(message.handle, refusal)
            return
        try:
            if key not in self._made:
                self._compiler.begin(key, message.guide, message.tenant)
        except RequestError as error:
            self._refuse(message.handle, error_info(error))
            return
        waiting = self._waits.setdefault(key, {})
        if waiting:  # one copy of the guide for all
            message = replace(message, guide=next(iter(waiting.values())).guide)
        waiting[message.handle] = message
        self._waiting_for[message.handle] = key

    def _close(self, handle: bytes) -> None:
        self._matchers.close(handle)
        self._branches.close(handle)
        self._guide_of.pop(handle, None)
        key = self._waiting_for.pop(handle, None)
        if key is not None:
            waiting = self._waits[key]
            del waiting[handle]
            if not waiting:
                del self._waits[key]
                self._compiler.cancel(key)

    def _take(self, key: bytes, compiled: Compiled) -> None:
        """Process the result of a guide that was tried."""
        if compiled.error is None:
            if key in self._waits:
                tenant = next(iter(self._waits[key].values())).tenant
                self._make(key, compiled.grammar, tenant)
            return
        for handle in self._end_wait(key):
            self._refuse(handle, compiled.error)

    def _make(self, key: bytes, grammar: str, tenant: str) -> None:
        made = self._thread.submit(self._vocabulary.compile, grammar)
        self._made[key] = (made, len(grammar), tenant)
        made.add_done_callback(lambda _: os.eventfd_write(self._bell, 1))

    def _take_made(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        done = [key for key, (made, _, _) in self._made.items() if made.done()]
        for key in done:
            made, num_chars, tenant = self._made.pop(key)
            start = made.result()
            waiting = self._end_wait(key)
            if start.is_error():
                error = error_info(InvalidRequest(f"guide: {reason_of(start)}", code="invalid_guide"))
                for handle in waiting:
                    self._refuse(handle, error)
                continue
            self._ready.add(key, start, num_chars, tenant)
            for message in waiting.values():
                self._begin(message, start)

    def _end_wait(self, key: bytes) -> dict[bytes, OpenMatcher]:
        waiting = self._waits.pop(key, {})
        for handle in waiting:
            del self._waiting_for[handle]
        return waiting

    def _begin(self, message: OpenMatcher, start: Matcher) -> None:
        try:
            self._matchers.open(
                message.handle, start, message.output_ids, self._place(message), message.tenant
            )
        except RequestError as error:
            self._give_up(message.handle, error)

    def _place(self, message: OpenMatcher) -> MaskPlace | None:
        """Return the place where masks are written. None: they are sent, or the scheduler that asked
        is gone.
        """
        if not message.memory:
            return None
        try:
            if self._memory is None or self._memory.name != message.memory:
                self._memory = MaskMemory.open(message.memory)
            self._memory.slot(message.slot + max(0, message.num_slots - 1))
        except (OSError, ValueError, IndexError):
            return None
        return MaskPlace(self._memory, message.slot, message.num_slots)

    def _give_up(self, handle: bytes, error: RequestError) -> None:
        """Refuse a sequence that cannot go on in its guide. All texts that are followed in a compiled guide
        add to its states, so those of earlier sequences may be the reason: the next one gets a new one.
        """
        self._ready.forget(self._guide_of.get(handle, b""))
        self._refuse(handle, error_info(error))

    def _refuse(self, handle: bytes, error: ErrorInfo) -> None:
        self._scheduler.send(GuideRefused(handle, error))

    # -- masks ----------------------------------------------------------------------------------------------

    def _branch(self, message: BranchMatchers) -> None:
        start = self._matchers.start_of(message.handle)
        if start is None:
            return
        try:
            states = self._branches.branch(start, message)
        except GuideBroken as error:
            self._give_up(message.handle, error)
            self._close(message.handle)
            return
        if states is not None:
            self._masks_out.send(states)

    def _tell(self, most: int) -> None:
        states: list[MatcherState] = []
        for each in self._matchers.news(most):
            if isinstance(each, GuideBroken):
                self._give_up(each.handle, each)
            else:
                states.append(each)
        if states:
            self._masks_out.send(MatcherStates(tuple(states)))

    def close(self) -> None:
        self._compiler.close()
        self._thread.shutdown(wait=False)
        os.close(self._bell)
