"""Reasoning between two tags, without the line breaks beside them."""

from __future__ import annotations

from carousel.server.chat.reader import Markers, Reader, Steps

CALL = "<tool_call>"
_JSON_OR_FUNCTION = ("{", "<function=")


def read_thoughts(
    r: Reader, end: str, also_end: tuple[str, ...] = (), *, ends_at_call: bool = False
) -> Steps[str]:
    """Parse reasoning after its opening tag. Returns the marker that ends it, or "" at the end of the text.
    Markers other than `end` are parsed again. With `ends_at_call` a call ends it, too, because models leave
    the closing tag out.
    """
    r.is_thinking = True
    while (yield from r.take("\n")):
        pass
    held: list[str] = []
    """Line breaks that may be the last ones."""

    def think(text: str) -> None:
        if body := text.rstrip("\n"):
            r.say("".join(held) + body, "reasoning")
            held.clear()
        held.append(text[len(body) :])

    begins = (*_JSON_OR_FUNCTION, *r.tools.names) if ends_at_call and r.tools.names else ()
    markers = Markers(end, *also_end, *((CALL,) if begins else ()))
    while marker := (yield from r.until(markers, think)):
        if marker != CALL or marker in also_end:
            break
        yield from r.space()
        if (yield from r.follows(begins)):
            break
        r.give_up(think)
    if marker != end:
        r.say("".join(held), "reasoning")
    r.end_item()
    r.is_thinking = not marker
    if marker != end:
        r.rewind()
        return marker
    r.settle()
    while (yield from r.take("\n")):
        pass
    return marker
