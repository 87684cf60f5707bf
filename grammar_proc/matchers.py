"""Matchers: where the output of each guided sequence stands in its guide.

A matcher's state follows from the guide and the ids alone, so whoever has those can have it made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import llguidance

from grammar_proc.vocabulary import Vocabulary, reason_of
from runtime.base.errors import InvalidRequest
from runtime.wire.format import TOKEN_BYTES, unpack_ids
from runtime.wire.messages import MatcherState


@dataclass(slots=True, eq=False)
class _Entry:
    matcher: llguidance.LLMatcher
    num_tokens: int


class GuideBroken(InvalidRequest):
    """A matcher cannot go on."""

    def __init__(self, handle: bytes, message: str) -> None:
        super().__init__(message, code="guide_too_complex")
        self.handle = handle


class Matchers:
    """By handle."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._entries: dict[bytes, _Entry] = {}
        self._changed: dict[bytes, None] = {}
        """Sequences whose state is to be told."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_news(self) -> bool:
        return bool(self._changed)

    def open(self, handle: bytes, start: llguidance.LLMatcher, output_ids: bytes) -> None:
        """Begin where `start` is, and follow the output that there is. Raises InvalidRequest."""
        ids = _ids(output_ids)
        matcher = start.deep_copy()
        if ids is None or (ids and not matcher.consume_tokens(ids)):
            self.close(handle)
            raise InvalidRequest("resume: the output that there is does not match the guide", param="resume")
        self._entries[handle] = _Entry(matcher, len(ids))
        self._changed[handle] = None

    def advance(self, handle: bytes, num_tokens: int, output_ids: bytes) -> None:
        """Follow new ids, after which there are so many. What is of an earlier matcher changes nothing."""
        entry, ids = self._entries.get(handle), _ids(output_ids)
        if entry is not None and ids is not None and entry.num_tokens + len(ids) == num_tokens:
            entry.num_tokens = num_tokens
            entry.matcher.consume_tokens(ids)  # a mistake shows as an error of the matcher
            self._changed[handle] = None

    def close(self, handle: bytes) -> None:
        self._entries.pop(handle, None)
        self._changed.pop(handle, None)

    def clear(self) -> None:
        self._entries.clear()
        self._changed.clear()

    def news(self, most: int) -> Iterator[MatcherState | GuideBroken]:
        """Return the states of at most so many that have changed; those that cannot go on are closed."""
        handles = list(self._changed)[:most]
        entries = [self._entries[handle] for handle in handles]
        masks = self._vocabulary.masks([entry.matcher for entry in entries])
        for handle, entry, mask in zip(handles, entries, masks, strict=True):
            del self._changed[handle]
            if entry.matcher.is_error():
                self.close(handle)
                yield GuideBroken(handle, f"the guide is too complex: {reason_of(entry.matcher)}")
                continue
            packed = mask.tobytes() if mask.any() else b""
            yield MatcherState(handle, entry.num_tokens, packed, entry.matcher.is_accepting())


def _ids(packed: bytes) -> list[int] | None:
    """None for what are no ids, which no scheduler sends."""
    if len(packed) % TOKEN_BYTES:
        return None
    ids: list[int] = unpack_ids(packed).tolist()
    return None if ids and min(ids) < 0 else ids
