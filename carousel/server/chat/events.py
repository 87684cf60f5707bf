"""Events of an answer: its items (text, reasoning, calls of tools) as they begin, grow and end.

Parsers make them and the formats of endpoints spell them; usage and the end of a sequence are with the delta
that they were made of.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

ItemKind: TypeAlias = Literal["text", "reasoning", "tool_call"]


class ItemBegun(Struct, frozen=True):
    kind: ItemKind
    id: str = ""
    """The id and the name of a call."""
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
