"""OutputItems: the items of an answer to /v1/responses, as they begin, grow and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Raw
from msgspec.json import encode

from carousel.client.core.logprobs import TokenLogprob
from carousel.server.chat.events import ItemBegun, ItemKind
from carousel.server.openai.logprobs import TokenSpeller, finite
from carousel.server.request.sse import TEXT_MARK
from carousel.server.responses.types import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputLogprob,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    TopTokenLogprob,
)
from runtime.base.random_ids import random_id

LOGPROBS_MARK = encode(TEXT_MARK)
SLICE_BYTES = 64 << 10
PREFIXES: dict[ItemKind, str] = {"text": "msg_", "reasoning": "rs_", "tool_call": "fc_"}


@dataclass(slots=True)
class GrowingItem:
    kind: ItemKind
    index: int
    call_id: str = ""
    name: str = ""
    id: str = field(init=False)
    status: ItemStatus = "in_progress"
    logprobs: bytearray = field(default_factory=bytearray)
    """JSON of the logprobs of its tokens, without brackets."""
    is_marked: bool = False
    """True if LOGPROBS_MARK stands for its logprobs, which may be megabytes (`filled`)."""
    _texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = PREFIXES[self.kind] + random_id()

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def text(self) -> str:
        """Return its text, or the arguments of a call, so far."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def shown_logprobs(self) -> Raw:
        if self.is_marked:
            return Raw(LOGPROBS_MARK)
        return Raw(b"".join((b"[", self.logprobs, b"]")))

    def part(self) -> OutputText | ReasoningText:
        """Return the one part of its content."""
        if self.kind == "reasoning":
            return ReasoningText(self.text)
        return OutputText(self.text, logprobs=self.shown_logprobs())

    def body(self, *, is_empty: bool = False) -> OutputItem:
        """Return the item so far; with `is_empty` as it begins."""
        if self.kind == "tool_call":
            return FunctionCallItem(
                id=self.id,
                status=self.status,
                call_id=self.call_id,
                name=self.name,
                arguments="" if is_empty else self.text,
            )
        if self.kind == "reasoning":
            thoughts = [] if is_empty else [ReasoningText(self.text)]
            return ReasoningItem(id=self.id, status=self.status, content=thoughts)
        part = self.part()
        assert isinstance(part, OutputText)
        return OutputMessage(id=self.id, status=self.status, content=[] if is_empty else [part])


class OutputItems:
    def __init__(self) -> None:
        self._items: list[GrowingItem] = []
        self.open: GrowingItem | None = None
        """The last item, until it ends."""

    def __len__(self) -> int:
        return len(self._items)

    def begin(self, event: ItemBegun) -> GrowingItem:
        item = self.open = GrowingItem(event.kind, len(self._items), event.id, event.name)
        self._items.append(item)
        return item

    def end(self, *, is_whole: bool) -> GrowingItem:
        """End the open item."""
        item = self.open
        assert item is not None, "an item ends that has not begun"
        item.status = "completed" if is_whole else "incomplete"
        self.open = None
        return item

    def filled(self, data: bytes) -> Iterator[bytes]:
        """Yield events about all items, with their logprobs for the marks."""
        return filled(data, [item.logprobs for item in self._items if item.is_marked])

    def bodies(self) -> list[OutputItem]:
        return [item.body() for item in self._items]


def filled(data: bytes, logprobs: Sequence[bytearray]) -> Iterator[bytes]:
    """Yield events in pieces, with logprobs for the marks in them."""
    first, *rest = data.split(LOGPROBS_MARK)
    yield first
    for own, part in zip(logprobs, rest, strict=True):
        yield b"["
        for start in range(0, len(own), SLICE_BYTES):
            yield bytes(own[start : start + SLICE_BYTES])
        yield b"]" + part


def spelled_logprobs(entries: Sequence[TokenLogprob], speller: TokenSpeller) -> list[OutputLogprob]:
    return [
        OutputLogprob(
            speller.text(entry.token_id),
            speller.bytes(entry.token_id) or [],
            finite(entry.logprob),
            [
                TopTokenLogprob(speller.text(token_id), speller.bytes(token_id) or [], finite(value))
                for token_id, value in entry.top
            ],
        )
        for entry in entries
    ]
