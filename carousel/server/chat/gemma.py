"""gemma4: <|tool_call>call:f{a:<|"|>text<|"|>,b:[1,{c:true}]}<tool_call|>"""

from __future__ import annotations

import json
import re

from carousel.server.chat.json_calls import NAME
from carousel.server.chat.reader import MAX_DEPTH, Markers, Reader, Sink, Steps, is_number
from carousel.server.chat.thoughts import read_thoughts

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_MARKERS = (BEGIN, END, QUOTE)
CHANNEL, THOUGHT_END = "<|channel>", "<channel|>"
THOUGHT = f"{CHANNEL}thought"

_QUOTES = Markers(QUOTE)
_NUMBER = re.compile(r"[-+.0-9eE]*")
_OPEN_NUMBER = re.compile(r"-?\d+\.", re.ASCII)
"""A float with a whole value as Python writes it, which is not JSON."""
_KEY = re.compile(r"[^\s:{}\[\],\"<]*")


def gemma4(r: Reader) -> Steps[None]:
    markers = Markers(BEGIN)
    while (yield from r.until(markers)):
        yield from _call(r)


def gemma4_behind_reasoning(r: Reader) -> Steps[None]:
    """Parse text, calls and more reasoning. Tags without a counterpart are left out."""
    markers = Markers(CHANNEL, THOUGHT_END, *((BEGIN,) if r.tools.names else ()))
    while marker := (yield from r.until(markers)):
        if marker == BEGIN:
            yield from _call(r)
            continue
        r.settle()
        if marker == CHANNEL:
            while (yield from r.take(CHANNEL)):
                pass
            yield from r.take("thought")
            yield from read_thoughts(r, THOUGHT_END)


def _call(r: Reader) -> Steps[None]:
    """Parse a call after its marker. If it is none, it is text."""
    yield from r.space()
    if (yield from r.take("call:")):
        yield from r.space()
        name = yield from r.run(NAME)
        yield from r.space()
        if name and (yield from r.peek()) == "{":
            r.begin_call(name)
            r.end_call(is_whole=(yield from _value(r, r.add, 0)))
            yield from r.space()
            yield from r.take(END)
    r.give_up()


def _value(r: Reader, sink: Sink, depth: int) -> Steps[bool]:
    """Parse a value and give it to `sink` as JSON. Returns False if there is none or it breaks off."""
    yield from r.space()
    if (yield from r.take(QUOTE)):
        return (yield from _quoted(r, sink))
    char = yield from r.peek()
    if char in "-0123456789" and char:
        return (yield from _number(r, sink))
    if char not in ("{", "["):
        return (yield from r.json_value(sink))
    close = "}" if char == "{" else "]"
    if depth >= MAX_DEPTH // 8:
        return False
    yield from r.take(char)
    sink(char)
    yield from r.space()
    if (yield from r.take(close)):
        sink(close)
        return True
    while True:
        if char == "{" and not (yield from _key(r, sink)):
            return False
        if not (yield from _value(r, sink, depth + 1)):
            return False
        yield from r.space()
        if (yield from r.take(close)):
            sink(close)
            return True
        if not (yield from r.take(",")):
            return False
        sink(", ")
        yield from r.space()


def _number(r: Reader, sink: Sink) -> Steps[bool]:
    """Parse a number and give it to `sink` as JSON."""
    number = written = yield from r.run(_NUMBER)
    if _OPEN_NUMBER.fullmatch(number):
        number += "0"
    if not is_number(number):
        r.pos -= len(written)
        return False
    sink(number)
    return True


def _key(r: Reader, sink: Sink) -> Steps[bool]:
    """Parse the name of a member, which needs no quotes, and the colon."""
    parts: list[str] = []
    if (yield from r.take(QUOTE)):
        is_there = yield from _quoted(r, parts.append)
    elif (yield from r.peek()) == '"':
        is_there = yield from r.json_value(parts.append)
    else:
        key = yield from r.run(_KEY)
        is_there = bool(key)
        parts.append(json.dumps(key, ensure_ascii=False))
    yield from r.space()
    is_whole = is_there and (yield from r.take(":"))
    sink("".join(parts) + (": " if is_whole else ""))
    return is_whole


def _quoted(r: Reader, sink: Sink) -> Steps[bool]:
    """Parse the rest of a string in the format's own quotes."""
    sink('"')
    marker = yield from r.until(_QUOTES, lambda text: sink(json.dumps(text, ensure_ascii=False)[1:-1]))
    r.settle()
    sink('"' if marker else "")
    return bool(marker)
