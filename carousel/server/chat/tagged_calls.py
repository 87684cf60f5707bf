"""Formats that write each argument as text between tags: qwen3_coder and glm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from carousel.server.chat.pythonic import MAX_OUTSIDE, literal_as_json
from carousel.server.chat.reader import Markers, Reader, Sink, Steps

_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_KINDS = {"object": dict[str, msgspec.Raw], "array": list[msgspec.Raw], "number": float}


class ArgumentsReader:
    """Arguments of one call as JSON, made of their texts. Those of strings are passed on as they come."""

    def __init__(self, r: Reader, name: str) -> None:
        self._reader = r
        self._name = name
        self._keys: set[str] = set()
        r.begin_call(name)

    def read(self, key: str, close: str, follow: tuple[str, ...]) -> Steps[bool]:
        """Parse the value of an argument up to `close`, as `tagged_text` does."""
        r = self._reader
        types = r.tools.types_of(self._name, key)
        is_new = key not in self._keys
        head = f"{', ' if self._keys else '{'}{_encoded(key)}: "
        if types is None or types == {"string"}:
            parts: list[str] = []
            if is_new:
                self._keys.add(key)
                r.add(head + '"')
            is_whole = yield from tagged_text(
                r, close, follow, (lambda text: r.add(_encoded(text)[1:-1])) if is_new else parts.append
            )
            if is_new and is_whole:
                r.add('"')
            return is_whole
        parts = []
        is_whole = yield from tagged_text(r, close, follow, parts.append)
        if is_new:
            self._keys.add(key)
            text = "".join(parts)
            r.add(head + (as_json(text, types) if is_whole else text))
        return is_whole

    def end(self, *, is_whole: bool) -> None:
        if is_whole:
            self._reader.add("}" if self._keys else "{}")
        self._reader.end_call(is_whole=is_whole)


def tagged_text(r: Reader, close: str, follow: tuple[str, ...], sink: Sink) -> Steps[bool]:
    """Give the text up to `close` to `sink` as it comes. If it stands on lines of its own, the line breaks at
    its ends are left out. `close` counts only if one of `follow` comes after it; elsewhere it is part of the
    text. Returns False if the text breaks off.
    """
    markers = Markers("\n" + close, close) if (yield from r.take("\n")) else Markers(close)
    while (yield from r.until(markers, sink)):
        yield from r.space()
        if (yield from r.follows(follow)):
            r.settle()
            return True
        r.give_up(sink)
    return False


def as_json(text: str, types: frozenset[str]) -> str:
    """Return an argument as JSON of one of its types, or else as a string. Without types it may be of any.
    Some models write objects and lists as Python does.
    """
    value = text.strip()
    if "null" in types and value.lower() in ("null", "none"):
        return "null"
    if "string" in types:
        return _encoded(text)
    if (not types or "boolean" in types) and value.lower() in ("true", "false"):
        return value.lower()
    if "integer" in types and _INTEGER.fullmatch(value):
        return value
    kinds = [kind for name, kind in _KINDS.items() if name in types] if types else [msgspec.Raw]
    for kind in kinds:
        if _is_of(kind, value):
            return value
    if value[:1] in ("{", "[") and len(value) <= MAX_OUTSIDE:
        literal = literal_as_json(value)
        if literal is not None and any(_is_of(kind, literal) for kind in kinds):
            return literal
    return _encoded(text)


def _is_of(kind: Any, value: str) -> bool:
    try:
        msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
        return False
    return True


def _encoded(text: str) -> str:
    return msgspec.json.encode(text).decode()


@dataclass(frozen=True, slots=True)
class Tags:
    """Spellings around the name of an argument, around its value, and after the last argument."""

    key: tuple[str, str]
    value: tuple[str, str]
    end: str


QWEN = Tags(("<parameter=", ">"), ("", "</parameter>"), "</function>")
GLM = Tags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>")
MAX_NAME = 256
_QWEN_FUNCTION = "<function="
_QWEN_NAME, _GLM_NAME = re.compile(r"[^<>\n]*"), re.compile(r"[^<\n]*")


def tagged_call(r: Reader, name: str, tags: Tags) -> Steps[bool]:
    """Parse the arguments of a call after its name. Returns False if there are none; no call has
    begun then.
    """
    arguments: ArgumentsReader | None = None
    while True:
        yield from r.space()
        if arguments is not None:
            r.mark()
        if not (yield from r.take(tags.key[0])):
            break
        key = (yield from r.run(_QWEN_NAME, most=MAX_NAME)).strip()
        has_value = bool(key and name) and (yield from r.take(tags.key[1]))
        if has_value and tags.value[0]:
            yield from r.space()
            has_value = yield from r.take(tags.value[0])
        if not has_value:
            if arguments is not None:
                r.give_up()
                arguments.end(is_whole=False)
            return arguments is not None
        r.settle()
        arguments = arguments or ArgumentsReader(r, name)
        if not (yield from arguments.read(key, tags.value[1], (tags.key[0], tags.end))):
            arguments.end(is_whole=False)
            return True
    is_whole = bool(name) and (yield from r.take(tags.end))
    if arguments is None:
        if not is_whole:
            return False
        arguments = ArgumentsReader(r, name)
    r.settle()
    arguments.end(is_whole=is_whole)
    return True


def qwen3_coder(r: Reader) -> Steps[None]:
    """Parse <tool_call><function=f><parameter=a>1</parameter></function></tool_call>."""
    markers = Markers("<tool_call>", _QWEN_FUNCTION)
    while marker := (yield from r.until(markers)):
        yield from r.space()
        if marker == _QWEN_FUNCTION or (yield from r.take(_QWEN_FUNCTION)):
            name = (yield from r.run(_QWEN_NAME, most=MAX_NAME)).strip()
            if (yield from r.take(">")) and (yield from tagged_call(r, name, QWEN)):
                yield from r.space()
                yield from r.take("</tool_call>")
        r.give_up()


def glm(r: Reader) -> Steps[None]:
    """Parse <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>."""
    markers = Markers("<tool_call>")
    while (yield from r.until(markers)):
        name = (yield from r.run(_GLM_NAME, most=MAX_NAME)).strip()
        yield from tagged_call(r, name, GLM)
        r.give_up()
