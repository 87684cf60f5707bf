"""Branches: the matchers of the hypotheses of beam searches with a guide.

A matcher is copied where hypotheses fork. The scheduler names all hypotheses of a search in one message, and
gets all masks in one. All hypotheses begin at the matcher of the search, which itself does not move.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grammar_proc.backend import BackendVocabulary, Matcher
from grammar_proc.matching.matchers import GuideBroken
from grammar_proc.matching.state_maker import FAIR_STEP_S, MAX_EXCESS_S, cause_of, too_complex
from grammar_proc.vocabulary import is_used_up, reason_of
from runtime.wire.format import unpack_ids
from runtime.wire.hypotheses import FROM_THE_START, BranchMatchers, BranchStates


@dataclass(slots=True, eq=False)
class _Followed:
    """Hypotheses of a message that have been followed."""

    matchers: list[Matcher] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)
    are_complete: list[bool] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Search:
    matchers: list[Matcher] = field(default_factory=list)
    messages: deque[BranchMatchers] = field(default_factory=deque)
    """Messages whose hypotheses have yet to be followed; `followed` is of the first."""
    followed: _Followed = field(default_factory=_Followed)
    excess_s: float = 0.0
    """CPU time beyond the allowance of its tokens."""


class BranchBroken(GuideBroken):
    """Raised when the matcher of a hypothesis cannot go on."""

    def __init__(self, handle: bytes, matcher: Matcher) -> None:
        super().__init__(handle, too_complex(reason_of(matcher)))
        self.is_used_up = is_used_up(matcher)


class Branches:
    """The matchers of all beam searches, by the handle of the search."""

    def __init__(
        self, vocabulary: BackendVocabulary[Any], on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """`on_progress` is called before operations that may take long."""
        self._vocabulary = vocabulary
        self._on_progress = on_progress
        self._searches: dict[bytes, _Search] = {}

    def add(self, message: BranchMatchers) -> None:
        """Take the hypotheses of a search, which `step` follows."""
        self._searches.setdefault(message.handle, _Search()).messages.append(message)

    def has_work(self, handle: bytes) -> bool:
        search = self._searches.get(handle)
        return search is not None and bool(search.messages)

    def step(self, start: Matcher, handle: bytes) -> BranchStates | None:
        """Follow one hypothesis of a search, whose matcher is `start`, and make its mask. Returns the answer
        if it was the last of its message. One that continues hypotheses which are not there any more, or only
        in an earlier grammar process, has no answer. Raises BranchBroken if a hypothesis cannot go on.
        """
        search = self._searches[handle]
        message, followed = search.messages[0], search.followed
        if len(followed.masks) < len(message.entries):
            parent, packed = message.entries[len(followed.masks)]
            if parent >= len(search.matchers):
                search.messages.popleft()
                search.followed = _Followed()
                return None
            before = None if parent == FROM_THE_START else search.matchers[parent]
            matcher, mask = self._go_on(search, start, before, packed)
            if matcher.is_error() or search.excess_s > MAX_EXCESS_S:
                raise BranchBroken(handle, cause_of(self._vocabulary, start, matcher))
            followed.matchers.append(matcher)
            followed.masks.append(mask)
            followed.are_complete.append(matcher.is_accepting())
        if len(followed.masks) < len(message.entries):
            return None
        search.messages.popleft()
        search.matchers, search.followed = followed.matchers, _Followed()
        return BranchStates(handle, message.num_tokens, tuple(followed.masks), tuple(followed.are_complete))

    def close(self, handle: bytes) -> bool:
        """Drop the hypotheses of a search. Returns False if there are none."""
        return self._searches.pop(handle, None) is not None

    def clear(self) -> None:
        self._searches.clear()

    def _go_on(
        self, search: _Search, start: Matcher, before: Matcher | None, packed: bytes
    ) -> tuple[Matcher, bytes]:
        """Return the matcher and the mask after some ids, which come after `before`, or `start` if it is
        None.
        """
        self._on_progress()
        began = time.thread_time()
        ids: list[int] = unpack_ids(packed).tolist()
        if before is None:
            matcher = self._vocabulary.follow(start, ids)
        else:
            matcher = before.deep_copy()
            matcher.consume_tokens(ids)  # a failure sets the error of the matcher
        mask, _ = self._vocabulary.timed_mask(matcher)
        search.excess_s += max(0.0, time.thread_time() - began - FAIR_STEP_S * len(ids))
        return matcher, mask.tobytes() if mask.any() else b""
