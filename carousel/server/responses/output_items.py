"""OutputItems: the items of an answer to /v1/responses, as they begin, grow and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, Raw

from carousel.client.core.logprobs import LogprobColumns, TokenLogprob
from carousel.server.chat.events import ItemBegun, ItemKind
from carousel.server.responses.tool_names import CalledTool, text_of
from carousel.server.responses.types import (
    CustomToolCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    empty_list,
)
from runtime.base.random_ids import random_id

PREFIXES: dict[ItemKind, str] = {"text": "msg_", "reasoning": "rs_", "tool_call": "fc_"}

NO_TOOL = CalledTool("")


@dataclass(slots=True)
class GrowingItem:
    kind: ItemKind
    index: int
    call_id: str = ""
    tool: CalledTool = NO_TOOL
    """Tool of a call."""
    id: str = field(init=False)
    status: ItemStatus = "in_progress"
    logprobs: LogprobColumns[TokenLogprob] = field(default_factory=LogprobColumns)
    """Logprobs of its tokens. They stay packed, because the events at its end and the answer's repeat them.
    """
    shown_logprobs: Raw = field(default_factory=empty_list)
    """JSON of the logprobs, or a mark in their place."""
    _texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = ("ctc_" if self.tool.is_custom else PREFIXES[self.kind]) + random_id()

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def text(self) -> str:
        """Return its text, or the arguments of a call, so far."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def part(self) -> OutputText | ReasoningText:
        """Return the one part of its content."""
        if self.kind == "reasoning":
            return ReasoningText(self.text)
        return OutputText(self.text, logprobs=self.shown_logprobs)

    def body(self, *, is_empty: bool = False) -> OutputItem:
        """Return the item so far; with `is_empty` as it begins."""
        if self.kind == "tool_call":
            return self._call("" if is_empty else self.text)
        if self.kind == "reasoning":
            thoughts = [] if is_empty else [ReasoningText(self.text)]
            return ReasoningItem(id=self.id, status=self.status, content=thoughts)
        part = self.part()
        assert isinstance(part, OutputText)
        return OutputMessage(id=self.id, status=self.status, content=[] if is_empty else [part])

    def _call(self, arguments: str) -> OutputItem:
        tool = self.tool
        same: Any = {"id": self.id, "status": self.status, "call_id": self.call_id, "name": tool.name}
        namespace = tool.namespace or UNSET
        if tool.is_custom:
            text = text_of(arguments) if arguments else ""
            return CustomToolCallItem(**same, namespace=namespace, input=text)
        return FunctionCallItem(**same, namespace=namespace, arguments=arguments)


class OutputItems:
    def __init__(self, called: Mapping[str, CalledTool]) -> None:
        """`called` has tools that go by other names here, or whose calls have another form."""
        self._called = called
        self._items: list[GrowingItem] = []
        self.open: GrowingItem | None = None
        """The last item, until it ends."""

    def __len__(self) -> int:
        return len(self._items)

    def begin(self, event: ItemBegun) -> GrowingItem:
        tool = self._called.get(event.name) or CalledTool(event.name)
        item = self.open = GrowingItem(event.kind, len(self._items), event.id, tool)
        self._items.append(item)
        return item

    def end(self, *, is_whole: bool) -> GrowingItem:
        """End the open item."""
        item = self.open
        assert item is not None, "an item ends that has not begun"
        item.status = "completed" if is_whole else "incomplete"
        self.open = None
        return item

    @property
    def num_logprob_bytes(self) -> int:
        return sum(item.logprobs.num_bytes for item in self._items)

    def bodies(self) -> list[OutputItem]:
        return [item.body() for item in self._items]
