"""Events of an answer: its items (text, reasoning, tool calls) as they begin, grow and end.

Parsers make them, and endpoints spell them in their formats. Usage and the end of a sequence come with the
delta from which the events were made.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

ItemKind: TypeAlias = Literal["text", "reasoning", "tool_call"]


class ItemBegun(Struct, frozen=True):
    kind: ItemKind
    id: str = ""
    """Id of a call; its name follows."""
    name: str = ""


class ItemDelta(Struct, frozen=True):
    kind: ItemKind
    text: str
    """The new text; in a call, new text of the JSON of its arguments."""


class ItemDone(Struct, frozen=True):
    kind: ItemKind
    is_whole: bool = True
    """False for a call whose arguments break off."""


Event: TypeAlias = ItemBegun | ItemDelta | ItemDone
