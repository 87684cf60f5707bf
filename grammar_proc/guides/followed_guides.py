"""Guides, and the sequences that follow them or wait for them.

A guide is tried in a child process, and compiled again in this process by a thread. A guide that was refused
is refused at once the next time.

If a compiled guide can be followed no more because of all that was followed in it, its sequences move to
another copy, which is compiled anew and follows their outputs from the start. Where sequences have moved
before, two copies have half of them each, so that at last one that is too much for a copy is alone in it, and
ends.

If guides take more memory than there is for them, those that nobody follows are forgotten. Then, of the
tenant whose guides take the most, the largest is compiled anew, which leaves the states of earlier texts
behind; where that is no help, its newest sequences wait until others have ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from grammar_proc.backend import BackendVocabulary
from grammar_proc.branches import Branches
from grammar_proc.compile_child import Compiled
from grammar_proc.compiler import GuideCompiler, key_of
from grammar_proc.guides.guide_memory import POOL_BYTES, GuideCopy, HeapMeter, give_back, largest
from grammar_proc.guides.ready_guides import GuideMaker, ReadyGuides, ToMake
from grammar_proc.matching.matcher_entry import MaskPlace
from grammar_proc.matching.matchers import Matchers
from grammar_proc.matching.state_maker import too_complex
from grammar_proc.vocabulary import reason_of
from runtime.base.errors import InvalidRequest, Overloaded, RequestError
from runtime.ring.suspects.in_hand import suspect_in_hand
from runtime.wire.error_info import error_info
from runtime.wire.messages import ErrorInfo, OpenMatcher

KEY_BYTES = 16
"""Length of the key of a guide. That of a copy which is for some sequences alone is longer."""
REBUILD_BYTES = 8 << 20
"""Bytes that have to be gained by it for a guide to be compiled anew."""
RESUME_BYTES = POOL_BYTES * 3 // 4
"""Bytes of guides up to which sequences are taken up again that wait for memory."""
MAX_HELD_S = 60.0
"""Seconds for which a sequence waits for memory without a new token, even if it is taken up meanwhile."""
RETRY_AFTER_S = 5.0


def _grammar_of(copy: GuideCopy) -> ToMake:
    return ToMake(copy.grammar, copy.tenant, copy.num_fresh_bytes, anew=True)


def _no_memory() -> Overloaded:
    return Overloaded(
        f"the guide: guides that are in use take all memory that there is for them ({POOL_BYTES >> 20} MiB); "
        "try again later",
        code="too_many_guides",
        retry_after_s=RETRY_AFTER_S,
    )


class _Wait(NamedTuple):
    """Last wait for memory of a sequence."""

    num_tokens: int
    """Number of tokens of its output when it began to wait."""
    until: float


class FollowedGuides:
    """The guides of all sequences. Refusals go to `refuse`."""

    def __init__(
        self,
        vocabulary: BackendVocabulary[Any],
        compiler: GuideCompiler,
        matchers: Matchers,
        branches: Branches,
        meter: HeapMeter,
        place_of: Callable[[OpenMatcher], MaskPlace | None],
        refuse: Callable[[bytes, ErrorInfo], None],
    ) -> None:
        """`place_of` returns the place where masks of a sequence are written."""
        self._compiler = compiler
        self._matchers = matchers
        self._branches = branches
        self._meter = meter
        self._place_of = place_of
        self._tell_refused = refuse
        self._ready = ReadyGuides()
        self._waits: dict[bytes, dict[bytes, OpenMatcher | None]] = {}
        """Sequences that wait for a guide: handle to message, by the guide's key. None: the sequence has a
        matcher, and moves.
        """
        self._waiting_for: dict[bytes, bytes] = {}
        """Key of the guide for which a sequence waits."""
        self._guide_of: dict[bytes, bytes] = {}
        """Key of the guide of each sequence."""
        self._maker = GuideMaker(lambda grammar, anew: vocabulary.compile(grammar, anew=anew), self._meter)
        self._num_copies = 0
        self._held: dict[bytes, ToMake] = {}
        """Sequences that wait for memory: handle to grammar. Those that wait together share an object."""
        self._memory_waits: dict[bytes, _Wait] = {}
        """The last waits of sequences that have waited for memory."""
        self._taken_up = b""
        """Key of the guide for which the last ones of them wait."""

    def __len__(self) -> int:
        """Return the number of sequences that follow a guide or wait for one."""
        return len(self._guide_of)

    @property
    def files(self) -> list[int]:
        """Return the file descriptors that become readable when there is something to do."""
        return [self._maker.file, *self._compiler.files]

    @property
    def is_busy(self) -> bool:
        """Return True if there may be something to do before a file becomes readable."""
        return self._compiler.is_busy or bool(self._held)

    def poll(self) -> None:
        """Take the guides that have been tried or compiled since the last call."""
        for key, compiled in self._compiler.poll():
            self._take(key, compiled)
        self._take_made()

    def open(self, message: OpenMatcher) -> None:
        self.close(message.handle)
        try:
            self._matchers.in_hand.check(suspect_in_hand(message.handle, message.content))
        except RequestError as error:
            self._refuse(message.handle, error_info(error))
            return
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
            if key not in self._maker:
                self._compiler.begin(key, message.guide, message.tenant)
        except RequestError as error:
            self._refuse(message.handle, error_info(error))
            return
        waiting = self._waits.setdefault(key, {})
        if (first := next(filter(None, waiting.values()), None)) is not None:  # one copy of the guide for all
            message = replace(message, guide=first.guide)
        waiting[message.handle] = message
        self._waiting_for[message.handle] = key

    def close(self, handle: bytes) -> None:
        self._matchers.close(handle)
        self._branches.close(handle)
        self._held.pop(handle, None)
        self._memory_waits.pop(handle, None)
        self._guide_of.pop(handle, None)
        key = self._waiting_for.pop(handle, None)
        if key is not None:
            waiting = self._waits[key]
            del waiting[handle]
            if not waiting:
                del self._waits[key]
                self._compiler.cancel(key)
                self._maker.cancel(key)

    def _take(self, key: bytes, compiled: Compiled) -> None:
        """Process the result of a guide that was tried."""
        if compiled.error is None:
            if key in self._waits and key not in self._maker:
                tenant = next(each.tenant for each in self._waits[key].values() if each is not None)
                self._maker.make(key, ToMake(compiled.grammar, tenant, compiled.num_bytes))
            return
        if key in self._maker:
            return  # sequences that move have it compiled anew, and those that are new wait for the same
        for handle in self._end_wait(key):
            self._refuse(handle, compiled.error)

    def _take_made(self) -> None:
        for key, copy in self._maker.done():
            waiting = self._end_wait(key)
            if copy.start.is_error():
                error = error_info(InvalidRequest(f"guide: {reason_of(copy.start)}", code="invalid_guide"))
                for handle in waiting:
                    self._refuse(handle, error)
                continue
            if len(key) == KEY_BYTES:  # else it is for those alone who wait for it
                self._ready.add(key, copy)
            for handle, message in waiting.items():
                if message is None:
                    self._matchers.resume(handle, copy)
                else:
                    self._begin(message, copy)

    def _end_wait(self, key: bytes) -> dict[bytes, OpenMatcher | None]:
        waiting = self._waits.pop(key, {})
        for handle in waiting:
            del self._waiting_for[handle]
        return waiting

    def _begin(self, message: OpenMatcher, copy: GuideCopy) -> None:
        try:
            self._matchers.open(
                message.handle,
                copy,
                message.output_ids,
                self._place_of(message),
                message.tenant,
                message.content,
            )
        except RequestError as error:
            self.give_up(message.handle, error)

    def move(self, copy: GuideCopy) -> None:
        """Have all sequences that follow a copy of a guide, which is used up, follow other ones."""
        handles = list(copy.handles)
        if not handles:
            return  # they move already
        again = any(self._matchers.num_moves(handle) for handle in handles)
        self._leave(copy, handles, is_move=True)
        half = -(-len(handles) // 2) if again else len(handles)
        for group in filter(None, (handles[:half], handles[half:])):
            self._compile_anew(_grammar_of(copy), group, for_all=not again)

    def _leave(self, copy: GuideCopy, handles: list[bytes], *, is_move: bool) -> None:
        self._ready.forget(self._guide_of[handles[0]], copy)
        for handle in handles:
            # A search gets its hypotheses again when the state of its own matcher is sent.
            is_search = self._branches.close(handle)
            self._matchers.leave(handle, is_move=is_move, is_due=is_search)

    def _compile_anew(self, grammar: ToMake, handles: list[bytes], *, for_all: bool) -> None:
        """Have sequences wait for a fresh copy of their guide. `for_all`: new ones will follow it, too."""
        key = self._guide_of[handles[0]]
        if not for_all:
            self._num_copies += 1
            key += self._num_copies.to_bytes(8)
        elif (ready := self._ready.get(key)) is not None:
            for handle in handles:
                self._matchers.resume(handle, ready)
            return
        if key not in self._maker:
            self._maker.make(key, grammar)
        self._waits.setdefault(key, {}).update(dict.fromkeys(handles))
        self._waiting_for.update(dict.fromkeys(handles, key))

    # -- memory ---------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Have guides take no more memory than there is for them."""
        if self._held:
            self._take_up()
        if self._meter.num_bytes <= POOL_BYTES:
            return
        self._ready.forget_unused()
        self._meter.read(now=True)
        while self._meter.num_bytes > POOL_BYTES and self._shrink():
            self._meter.read(now=True)  # nothing here may hold what has been left
        give_back()

    def _shrink(self) -> bool:
        """Have the largest copy of a guide take less, or another one of its tenant. Returns False if none is
        followed.
        """
        copies = list(self._matchers.copies())
        if not copies:
            return False
        copy = largest(copies)
        own = [each for each in copies if each.tenant == copy.tenant]
        handles = list(copy.handles)
        if copy.num_bytes - copy.num_fresh_bytes >= REBUILD_BYTES:
            for_all = self._ready.get(self._guide_of[handles[0]]) is copy
            self._leave(copy, handles, is_move=False)
            self._compile_anew(_grammar_of(copy), handles, for_all=for_all)
        elif len(own) > 1:
            self._hold(own[-1], list(own[-1].handles))
        elif len(handles) > 1:
            half = -(-len(handles) // 2)
            self._hold(copy, handles[half:])
            self._leave(copy, handles[:half], is_move=False)
            self._compile_anew(_grammar_of(copy), handles[:half], for_all=False)
        elif len(copies) > 1 and copy.num_bytes <= POOL_BYTES // 2:
            self._hold(copy, handles)
        else:
            error = too_complex(f"it takes more memory than there is ({POOL_BYTES >> 20} MiB)")
            self.give_up(handles[0], error)
        return True

    def _hold(self, copy: GuideCopy, handles: list[bytes]) -> None:
        """Have sequences wait for memory."""
        until = time.monotonic() + MAX_HELD_S
        self._leave(copy, handles, is_move=False)
        self._held.update(dict.fromkeys(handles, _grammar_of(copy)))
        for handle in handles:
            num_tokens, last = self._matchers.num_tokens(handle), self._memory_waits.get(handle)
            if last is None or last.num_tokens != num_tokens:
                self._memory_waits[handle] = _Wait(num_tokens, until)

    def _take_up(self) -> None:
        """Take up sequences that have waited for memory, if there is some; refuse those that have waited for
        too long.
        """
        now = time.monotonic()
        for handle in [handle for handle in self._held if self._memory_waits[handle].until <= now]:
            self.give_up(handle, _no_memory())
        if not self._held or self._taken_up in self._waits:
            return
        copies = self._matchers.copies()
        in_use = Counter[str]()
        for copy in copies:
            in_use[copy.tenant] += copy.num_bytes
        left = RESUME_BYTES - self._meter.num_bytes
        fitting = [grammar for grammar in self._held.values() if not copies or grammar.num_bytes <= left]
        if fitting:
            grammar = min(fitting, key=lambda each: in_use[each.tenant])
            handles = [handle for handle, each in self._held.items() if each is grammar]
            for handle in handles:
                del self._held[handle]
            self._compile_anew(grammar, handles, for_all=False)
            self._taken_up = self._waiting_for[handles[0]]

    def give_up(self, handle: bytes, error: RequestError) -> None:
        """Refuse a sequence that cannot go on in its guide, and close it. All texts that are followed in a
        compiled guide add to its states, so those of earlier sequences may be the reason: the next one gets a
        new one.
        """
        self._ready.forget(self._guide_of.get(handle, b""))
        self._refuse(handle, error_info(error))

    def _refuse(self, handle: bytes, error: ErrorInfo) -> None:
        self.close(handle)
        self._tell_refused(handle, error)

    def close_all(self) -> None:
        for handle in list(self._guide_of):
            self.close(handle)

    def end(self) -> None:
        self._compiler.close()
        self._maker.close()
