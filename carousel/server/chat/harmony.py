"""gpt-oss: an answer is a sequence of messages, each with a header that names its channel and, for a call,
the function.

        <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary to=functions.f
        <|constrain|>json<|message|>{...}<|call|>, and the channel `final` for the text.
"""

from __future__ import annotations

import re

from carousel.server.chat.json_calls import named_call
from carousel.server.chat.reader import Markers, Reader, Steps

CHANNEL, START, MESSAGE, CONSTRAIN = "<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"
END = "<|end|>"
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
NEXT_MESSAGE = f"{START}assistant"
HARMONY_MARKERS = (CHANNEL, START, MESSAGE, CONSTRAIN, END, "<|return|>", "<|call|>")

_CALL = "<|call|>"
_ENDS = Markers(END, "<|return|>", _CALL, START, CHANNEL)
_BODY = Markers(MESSAGE)
_FUNCTION = re.compile(r"to=functions\.([\w.:/-]+)")
_HEADER = re.compile(r"[\w .=:<|>/-]{0,128}")
_IS_REASONING = re.compile(r"<\|channel\|>\s*analysis\b")


def harmony(r: Reader, *, has_reasoning: bool = False) -> Steps[None]:
    """Parse messages. Text outside messages is text. With `has_reasoning` the channel `analysis` is
    reasoning, otherwise it is text, too.
    """
    # The prompt ends within the first header, which may continue with a function.
    r.mark()
    yield from r.space()
    begins_in_header = yield from r.take("to=functions.")
    r.rewind()
    marker = START if begins_in_header else (yield from _text(r))
    while marker:
        if marker not in (START, CHANNEL):
            marker = yield from _text(r)
            continue
        parts = [marker]
        body = yield from r.until(_BODY, parts.append)
        r.settle()
        header = "".join(parts)
        if body:
            marker = yield from _message(r, header, has_reasoning=has_reasoning)
            continue
        if not _HEADER.fullmatch(header):
            r.say(header)
        return


def _text(r: Reader) -> Steps[str]:
    """Parse text up to the next marker. Returns the marker, or "" at the end."""
    marker = yield from r.until(_ENDS)
    r.settle()
    return marker


def _message(r: Reader, header: str, *, has_reasoning: bool) -> Steps[str]:
    """Parse a message after its header. Returns the marker that ends it, or "" at the end."""
    found = _FUNCTION.search(header)
    if found is not None and r.tools.names:
        r.mark()
        if not (yield from named_call(r, found[1])):
            if found[1] and (yield from r.take(_CALL)):
                # A call without a body has no arguments.
                r.begin_call(found[1])
                r.add("{}")
                r.end_call(is_whole=True)
                return _CALL
            r.rewind()
    elif has_reasoning and _IS_REASONING.search(header):
        r.is_thinking = True
        marker = yield from r.until(_ENDS, lambda text: r.say(text, "reasoning"))
        r.settle()
        r.end_item()
        r.is_thinking = not marker
        return marker
    return (yield from _text(r))
