"""ItemReader: the events of an answer's items, each with the logprobs of its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from carousel.client.core.logprobs import LogprobColumns, TokenLogprob, packed_logprobs
from carousel.server.chat.answer import PIECE_CHARS, AnswerPlan, AnswerReader
from carousel.server.chat.events import Event, ItemBegun, ItemDelta, ItemDone
from carousel.server.openai.chat_format import ChatView
from carousel.server.openai.logprobs import TokenSpeller

PLAIN = AnswerPlan()


class _Part(NamedTuple):
    text: str
    token_ids: list[int]
    logprobs: LogprobColumns[TokenLogprob]


NONE = LogprobColumns[TokenLogprob]()
MORE = _Part("", [], NONE)
"""Part whose text and logprobs have been read before."""


class ItemReader:
    def __init__(self, view: ChatView, *, skips_special: bool) -> None:
        """`skips_special`: special tokens are left out of the text that is read."""
        self._reader = AnswerReader(view.plan or PLAIN, view.vocabulary)
        self._speller: TokenSpeller | None = None
        """Given if texts and calls have to be told apart token by token."""
        if view.shows_logprobs and view.plan is not None:
            self._speller = view.speller
        self._skips_special = skips_special
        self._text = ""
        """Text whose tokens have not been read."""
        self._unread: deque[tuple[int, LogprobColumns[TokenLogprob]]] = deque()
        """Tokens whose text has not come as a whole, with their logprobs."""
        self._pending: list[LogprobColumns[TokenLogprob]] = []
        """Logprobs of tokens that have been read, but may not belong to the text; packed, because there may
        be many.
        """
        self._has_begun = False

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def is_plain(self, text: str) -> bool:
        """Return True if the next text is unchanged text of the message, which need not be read."""
        return self._reader.is_plain(text)

    def read(
        self, text: str, token_ids: list[int], logprobs: Sequence[TokenLogprob], reason: str | None
    ) -> Iterator[tuple[Event, Sequence[TokenLogprob]] | None]:
        """Yield the events of the next part of an answer, those of text with the logprobs of its tokens.
        Those of reasoning and calls are left out. `reason` is the finish reason, if it is the last part. None
        stands behind each piece of a long part: others may have a turn.
        """
        packed = packed_logprobs(logprobs)
        for part in self._parts(_Part(text, token_ids, packed), is_last=reason is not None):
            told = part
            for events in self._reader.pieces(part.text, part.token_ids, is_last=False):
                yield from self._events(events, told)
                told = MORE
                if len(part.text) > PIECE_CHARS:
                    yield None
            if self._speller is None and self._pending and self._has_begun:
                # A large delta comes in parts, of which the first has the text.
                yield ItemDelta("text", ""), self._take("")
        if reason is None:
            return
        events = self._reader.read("", [], is_last=True)
        if not events and not self._has_begun:
            events = [ItemBegun("text"), ItemDone("text")]
        if events and reason != "stop" and isinstance(last := events[-1], ItemDone):
            # A call whose arguments are complete stays whole.
            events[-1] = ItemDone(last.kind, last.is_whole and last.kind == "tool_call")
        yield from self._events(events, None)

    def _events(
        self, events: list[Event], part: _Part | None
    ) -> Iterator[tuple[Event, Sequence[TokenLogprob]]]:
        """Yield events with logprobs. `part` is the text that made them; None: the end of the answer did."""
        if part is not None and part.logprobs:
            self._pending.append(part.logprobs)
        for event in events:
            self._has_begun = True
            if event.kind != "text":
                self._pending = []
            elif isinstance(event, ItemDelta):
                yield event, self._take(event.text)
                continue
            elif isinstance(event, ItemDone) and part is None and self._pending:
                yield ItemDelta("text", ""), _joined(self._pending)
            yield event, ()

    def _take(self, text: str) -> Sequence[TokenLogprob]:
        """Return the logprobs of the last tokens, those of a text. Before it there may be a marker."""
        pending, self._pending = self._pending, []
        if self._speller is None:
            return _joined(pending)
        start, num_chars = len(pending), len(text)
        while start and num_chars > 0:
            start -= 1
            (token_id,) = pending[start].arrays().ids.tolist()
            num_chars -= self._speller.num_chars(token_id, skips_special=self._skips_special)
        return _joined(pending[start:])

    def _parts(self, part: _Part, *, is_last: bool) -> Iterator[_Part]:
        """Yield a part of the answer as it is, or in pieces of one token each."""
        if self._speller is None:
            yield part
            return
        self._text += part.text
        num_told = min(len(part.token_ids), len(part.logprobs))
        self._unread.extend((part.token_ids[at], part.logprobs.part(at, at + 1)) for at in range(num_told))
        start = 0
        while self._unread:
            token_id, entry = self._unread[0]
            end = start + self._speller.num_chars(token_id, skips_special=self._skips_special)
            if end > len(self._text) and not is_last:
                break
            self._unread.popleft()
            yield _Part(self._text[start:end], [token_id], entry)
            start = min(end, len(self._text))
        self._text = self._text[start:]
        if is_last and self._text:
            yield _Part(self._text, [], NONE)


def _joined(parts: Sequence[LogprobColumns[TokenLogprob]]) -> Sequence[TokenLogprob]:
    if len(parts) == 1:
        return parts[0]
    joined = LogprobColumns[TokenLogprob]()
    for part in parts:
        joined.extend(part)
    return joined
