"""Stop strings: the first complete match, however the text is cut; nothing held back without a reason."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from detokenizer_proc.stop_strings import StopStringMatcher


def feed(
    stops: Sequence[str], pieces: Iterable[str], *, include_match: bool = False
) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops, include_match=include_match)
    text = ""
    for piece in pieces:
        new, matched = matcher.push(piece)
        text += new
        if matched is not None:
            return text, matched
    return text + matcher.flush(), None


def reference(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """The shortest beginning of the text that ends in a stop string; the longest such stop string."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.randrange(1, 5)
        pieces.append(text[:size])
        text = text[size:]
        if rng.random() < 0.2:
            pieces.append("")
    return pieces


def test_any_text_in_any_pieces_stops_at_the_first_complete_match() -> None:
    rng = random.Random(0)
    num_matches = 0
    for _ in range(4000):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        text = "".join(rng.choices("abc", k=rng.randrange(15)))
        expected = reference(stops, text)
        num_matches += expected[1] is not None
        assert feed(stops, cut(text, rng)) == expected, (stops, text)
    assert num_matches > 1000


def test_text_that_begins_no_stop_string_is_not_held_back() -> None:
    matcher = StopStringMatcher(["</answer>"], include_match=False)
    assert matcher.push("so it ") == ("so it ", None)
    assert matcher.push("is </ans") == ("is ", None)
    assert matcher.push("x") == ("</ansx", None)


def test_no_more_is_held_back_than_the_longest_stop_string_but_one_character() -> None:
    matcher = StopStringMatcher(["aaab"], include_match=False)
    assert matcher.push("a" * 10) == ("a" * 7, None)
    assert matcher.flush() == "aaa"
    assert matcher.flush() == ""


@pytest.mark.parametrize(("include", "expected"), [(False, "x = 1"), (True, "x = 1\n\n")])
def test_the_match_stays_in_the_text_only_when_asked(include: bool, expected: str) -> None:
    assert feed(["\n\n"], ["x = 1", "\n", "\ny"], include_match=include) == (expected, "\n\n")


def test_a_match_that_may_not_be_is_text_and_does_not_match_later() -> None:
    matcher = StopStringMatcher(["b", "abc"], include_match=False)
    assert matcher.push("ab", may_match=False) == ("", None)
    assert matcher.push("x") == ("abx", None)
    assert matcher.push("b") == ("", "b")


def test_a_stop_string_may_begin_in_text_that_may_not_match() -> None:
    matcher = StopStringMatcher(["END"], include_match=False)
    assert matcher.push("EN", may_match=False) == ("", None)
    assert matcher.push("D") == ("", "END")
