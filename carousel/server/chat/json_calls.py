"""Formats with calls in JSON: an object with name and arguments, or a name and then the arguments."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from carousel.server.chat.reader import Markers, Reader, Steps, widen_marker

NAME = re.compile(r"[\w.:/-]*")
ARGUMENTS = ("arguments", "parameters")
_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError)


def json_call(r: Reader, *, is_known: bool = False) -> Steps[bool]:
    """Parse {"name": ..., "arguments": {...}}, in any order. Returns False if it is no call; none has begun
    then. With `is_known` it is a call only with the name of one of the request's tools and with arguments.
    """
    yield from r.space()
    if not (yield from r.take("{")):
        return False
    name, arguments = "", ""
    while not (yield from _closes(r)):
        key = yield from _key(r)
        if key == "name" and not name:
            name = yield from _text(r)
            if not name or (is_known and name not in r.tools.names):
                return False
        elif key in ARGUMENTS and name and not arguments and (yield from r.peek()) == "{":
            yield from named_call(r, name)
            if r.last_is_whole:
                yield from _rest(r)
            return True
        else:
            value: list[str] = []
            if not key or not (yield from r.json_value(value.append)):
                return False
            if key in ARGUMENTS:
                arguments = _object_of("".join(value))
                if not arguments:
                    return False
        if not (yield from _continues(r)):
            return False
    if not name or (is_known and not arguments):
        return False
    r.begin_call(name)
    r.add(arguments or "{}")
    r.end_call(is_whole=True)
    return True


def _rest(r: Reader) -> Steps[None]:
    """Parse the object of a call to its end, after the arguments. Malformed JSON there is text."""
    r.mark()
    while (yield from _continues(r)) and not (yield from _closes(r)):
        key = yield from _key(r)
        if not key or not (yield from r.json_value(lambda _: None)):
            return r.give_up()
    r.settle()


def _key(r: Reader) -> Steps[str]:
    """Parse the name of a member, and the colon. Returns "" if there is none."""
    key = yield from _text(r)
    yield from r.space()
    if not (yield from r.take(":")):
        return ""
    yield from r.space()
    return key


def _continues(r: Reader) -> Steps[bool]:
    """Move past the comma after a member if another one follows. Returns False if the object ends."""
    yield from r.space()
    return (yield from r.take(",")) or (yield from r.peek()) == "}"


def _closes(r: Reader) -> Steps[bool]:
    yield from r.space()
    return (yield from r.take("}"))


def _text(r: Reader) -> Steps[str]:
    """Parse a JSON string. Returns its value; "" if it is none, or empty."""
    parts: list[str] = []
    if (yield from r.peek()) != '"' or not (yield from r.json_value(parts.append)):
        return ""
    return _decode_text("".join(parts))


def _decode_text(value: str) -> str:
    try:
        return msgspec.json.decode(value, type=str)
    except _ERRORS:  # an incomplete character
        return ""


def _object_of(value: str) -> str:
    """Return the arguments as the JSON of an object: some models write this object as a string, or null for
    none. Returns "" for anything else.
    """
    if value.startswith('"'):
        value = _decode_text(value)
    try:
        decoded = msgspec.json.decode(value, type=dict[str, msgspec.Raw] | None)
    except _ERRORS:
        return ""
    return value if decoded else "{}"


def named_call(r: Reader, name: str) -> Steps[bool]:
    """Parse the arguments of a call after its name. Returns False if there are none; no call has
    begun then.
    """
    yield from r.space()
    if not name or (yield from r.peek()) != "{":
        return False
    r.begin_call(name)
    r.end_call(is_whole=(yield from r.json_value(r.add)))
    return True


def _calls_in_list(r: Reader, *, is_known: bool = False) -> Steps[bool]:
    """Parse a list of calls after its opening bracket, each as `json_call` does. Returns False if there is
    none.
    """
    is_any = False
    while (yield from json_call(r, is_known=is_known)):
        is_any = True
        yield from r.space()
        if (yield from r.take("]")):
            break
        r.mark()
        if not (yield from r.take(",")):
            break
    return is_any


def hermes(r: Reader) -> Steps[None]:
    """Parse <tool_call>{"name": "f", "arguments": {...}}</tool_call>, or a list of such objects."""
    markers = Markers("<tool_call>")
    while (yield from r.until(markers)):
        yield from r.space()
        if (yield from (_calls_in_list(r) if (yield from r.take("[")) else json_call(r))):
            yield from r.space()
            yield from r.take("</tool_call>")
        r.give_up()


PYTHON_TAG = "<|python_tag|>"


def llama3_json(r: Reader) -> Steps[None]:
    """Parse {"name": "f", "parameters": {...}}, as the whole text or after a tag; several with ";" between
    them, or in a list.

    JSON without a tag is a call only if it has the name of a tool. After other text, its arguments have to
    come next.
    """
    markers = Markers(PYTHON_TAG, "{")
    r.mark()
    yield from r.space()
    yield from r.take(PYTHON_TAG)
    yield from r.space()
    is_list = yield from r.take("[")
    if is_list:
        yield from _calls_in_list(r, is_known=True)
    while True:
        while not is_list and (yield from json_call(r, is_known=True)):
            yield from r.space()
            r.mark()
            if not (yield from r.take(";")):
                break
        r.give_up()
        is_list = False
        while (marker := (yield from r.until(markers))) == "{" and not (yield from _is_known_call(r)):
            r.give_up()
        if marker == "{":
            r.rewind()
            r.mark()
        elif not marker:
            return


def _is_known_call(r: Reader) -> Steps[bool]:
    """Return True after the brace of {"name": "f", "parameters": {...}} with the name of a tool."""
    yield from r.space()
    if (yield from _key(r)) != "name" or (yield from _text(r)) not in r.tools.names:
        return False
    yield from r.space()
    if not (yield from r.take(",")):
        return False
    yield from r.space()
    return (yield from _key(r)) in ARGUMENTS and (yield from r.peek()) == "{"


def mistral(r: Reader) -> Steps[None]:
    """Parse [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...} for each call.
    Models also leave out the brackets around one call, or write the marker twice.
    """
    markers = Markers("[TOOL_CALLS]")
    while (yield from r.until(markers)):
        yield from r.space()
        while (yield from r.take("[TOOL_CALLS]")):
            yield from r.space()
        # If no call follows the last of these markers, none follows the others either.
        widen_marker(r)
        if (yield from r.take("[")):
            yield from _calls_in_list(r)
        elif (yield from r.peek()) == "{":
            yield from json_call(r)
        else:
            name = yield from r.run(NAME)
            if (yield from r.take("[CALL_ID]")):
                yield from r.run(NAME)
            yield from r.take("[ARGS]")
            yield from named_call(r, name)
        r.give_up()


_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_MARKERS = (_BEGIN, _END, _CALL, _SEPARATOR, _CALL_END)


def deepseek(r: Reader) -> Steps[None]:
    """Parse DeepSeek's sections of calls. V3.1: a begin marker, and for each call NAME, a separator and the
    arguments between two markers. V3: `function`, the separator and NAME, and the arguments in a block of
    Markdown.
    """
    yield from _section(r, _BEGIN, _CALL, _END, _deepseek_call)


def _section(
    r: Reader, begin: str, call: str, end: str, read_call: Callable[[Reader], Steps[bool]]
) -> Steps[None]:
    """Parse text and sections of calls. `read_call` parses from the marker of a call to that of its end."""
    markers = Markers(begin, call)
    while marker := (yield from r.until(markers)):
        yield from r.space()
        if marker == begin and (yield from r.take(end)):
            r.settle()
        elif marker == call or (yield from r.take(call)):
            while (yield from read_call(r)):
                yield from r.space()
                r.mark()
                if not (yield from r.take(call)):
                    yield from r.take(end)
                    r.mark()
                    break
        r.give_up()


def _deepseek_call(r: Reader) -> Steps[bool]:
    yield from r.space()
    name = yield from r.run(NAME)
    if not (yield from r.take(_SEPARATOR)):
        return False
    yield from r.space()
    if name == "function" and (yield from r.peek()) != "{":
        name = yield from r.run(NAME)
        yield from r.space()
        yield from r.take("```json")
    if not (yield from named_call(r, name)):
        return False
    yield from r.space()
    yield from r.take("```")
    yield from r.space()
    yield from r.take(_CALL_END)
    return True


_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI_MARKERS = (_SECTION, _SECTION_END, _KIMI_CALL, _KIMI_END, _KIMI_ARGUMENTS)
_KIMI_NAME = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?")


def kimi_k2(r: Reader) -> Steps[None]:
    """Parse a section of calls, each functions.NAME:NUMBER and its arguments after a marker."""
    yield from _section(r, _SECTION, _KIMI_CALL, _SECTION_END, _kimi_call)


def _kimi_call(r: Reader) -> Steps[bool]:
    yield from r.space()
    found = _KIMI_NAME.fullmatch((yield from r.run(NAME)))
    assert found is not None
    yield from r.space()
    if not (yield from r.take(_KIMI_ARGUMENTS)) or not (yield from named_call(r, found["name"])):
        return False
    yield from r.space()
    yield from r.take(_KIMI_END)
    return True
