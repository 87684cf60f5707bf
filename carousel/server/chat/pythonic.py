"""The format `pythonic`: calls written as Python, [f(a=1, b="x"), g()]."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from carousel.server.chat.reader import NO_MARKERS, Reader, Steps

_NAME = re.compile(r"[\w.]*")
_BEGINS_NAME = re.compile(r"[A-Za-z_]").match
_VALUE = re.compile(r"[^\"'()\[\]{},\\]+")
_ESCAPED = "\\'\"abfnrtv01234567xNuU\n"
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_OPEN, _CLOSE = "([{", ")]}"
MAX_DEPTH = 64
MAX_OUTSIDE = 1 << 13
"""Maximum number of characters of an argument outside its strings: 13 ms of work, during which no request is
served.
"""
START, END = "<|python_start|>", "<|python_end|>"


def pythonic(r: Reader) -> Steps[None]:
    """Parse [f(a=1, b="x"), g()] at the beginning of the text, for tools of the request."""
    r.mark()
    yield from r.space()
    yield from r.take(START)
    yield from r.space()
    if (yield from r.take("[")):
        while (yield from _call(r)):
            yield from r.space()
            r.mark()
            has_comma = yield from r.take(",")
            if has_comma:
                yield from r.space()
            if (yield from r.take("]")):
                yield from r.take(END)
                r.mark()
                break
            if not has_comma:
                break
    r.give_up()
    yield from r.until(NO_MARKERS)


def _call(r: Reader) -> Steps[bool]:
    """Parse f(a=1, ...). Returns False if it is no call; none has begun then."""
    yield from r.space()
    name = yield from r.run(_NAME)
    if name not in r.tools.names or not (yield from r.take("(")):
        return False
    yield from r.space()
    is_whole = yield from r.take(")")
    key, value = "", None
    if not is_whole:
        # The first argument shows whether this is a call. No event has been emitted yet.
        key, value = yield from _argument(r)
        if value is None:
            return False
    r.begin_call(name)
    keys: set[str] = set()
    while value is not None:
        if key not in keys:
            r.add(f"{', ' if keys else '{'}{json.dumps(key)}: {value}")
            keys.add(key)
        r.mark()
        has_more = yield from r.take(",")
        yield from r.space()
        is_whole = yield from r.take(")")
        if is_whole or not has_more:
            break
        key, value = yield from _argument(r)
    if value is not None:
        r.settle()
    r.give_up()
    if is_whole:
        r.add("}" if keys else "{}")
    r.end_call(is_whole=is_whole)
    return True


def _argument(r: Reader) -> Steps[tuple[str, str | None]]:
    """Parse name=value up to the comma or bracket after it. Returns both, the value as JSON."""
    yield from r.space()
    key = yield from r.run(_NAME)
    yield from r.space()
    if not _BEGINS_NAME(key) or not (yield from r.take("=")):
        return "", None
    parts: list[str] = []
    closing = ""
    num_outside = 0
    while (char := (yield from r.peek())) and num_outside <= MAX_OUTSIDE:
        num_outside += 1
        if char in "\"'":
            if not (yield from _string(r, parts)):
                return "", None
            continue
        if not closing and char in ",)":
            return key, literal_as_json("".join(parts))
        if char in _OPEN and len(closing) < MAX_DEPTH:
            closing += _CLOSE[_OPEN.index(char)]
        elif closing and char == closing[-1]:
            closing = closing[:-1]
        elif char in _OPEN + _CLOSE + "\\":
            break
        elif char != ",":
            parts.append(r.here(_VALUE))
            num_outside += len(parts[-1]) - 1
            continue
        parts.append(char)
        yield from r.take(char)
    return "", None


def _string(r: Reader, parts: list[str]) -> Steps[bool]:
    """Parse a string of Python, with one or three quotes."""
    quote = yield from r.peek()
    if (yield from r.take(quote * 3)):
        quote *= 3
    else:
        yield from r.take(quote)
        if (yield from r.take(quote)):
            parts.append(quote * 2)
            return True
    parts.append(quote)
    plain = re.compile(rf"[^\\{quote[0]}]+")
    while (yield from r.peek()):
        if (yield from r.take(quote)):
            parts.append(quote)
            return True
        if (yield from r.take("\\")):
            escaped = yield from r.peek()
            parts.append(("\\" if escaped in _ESCAPED else "\\\\") + escaped)
            yield from r.take(escaped)
            continue
        text = r.here(plain)
        if not text:
            text = quote[0]  # a single quote inside a triple-quoted string
            yield from r.take(text)
        # Models write unescaped line breaks in strings; Python needs an escape.
        parts.append(text.replace("\n", "\\n") if len(quote) == 1 else text)
    return False


def literal_as_json(literal: str) -> str | None:
    """Return a Python literal as JSON; None if it is none."""
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # "\\d", which is accepted
            node = ast.parse(literal.strip(), mode="eval").body
        return json.dumps(_value(node), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """Return the value of a literal. Raises ValueError for values that JSON does not have."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name.lower() in _CONSTANTS:
            return _CONSTANTS[name.lower()]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as value)):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(each) for each in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(each) for key, each in zip(keys, values, strict=True)}
    raise ValueError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError
