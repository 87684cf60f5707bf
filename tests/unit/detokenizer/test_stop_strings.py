"""Stop strings: the first complete match, however the text is cut; nothing held back without a reason."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import pytest

from detokenizer_proc.stop_strings import StopStringMatcher
from runtime.text.automaton import Automaton


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


ALPHABETS = ("ab", "aé", "ß😀")


def test_any_text_in_any_pieces_stops_at_the_first_complete_match() -> None:
    rng = random.Random(0)
    num_matches = 0
    for _ in range(4000):
        letters = rng.choice(ALPHABETS)
        stops = ["".join(rng.choices(letters, k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        text = "".join(rng.choices(letters + "c", k=rng.randrange(15)))
        expected = reference(stops, text)
        num_matches += expected[1] is not None
        assert feed(stops, cut(text, rng)) == expected, (stops, text)
    assert num_matches > 1000


def num_held(stops: Sequence[str], text: str) -> int:
    """Characters of the longest end of the text that is the beginning of a stop string and not all of it."""
    ends = (text[start:] for start in range(len(text)))
    return next((len(end) for end in ends if any(s.startswith(end) and s != end for s in stops)), 0)


def test_after_any_piece_exactly_what_may_become_a_stop_string_is_held_back() -> None:
    """Before `min_tokens` too, where a whole stop string is text that nothing can come of."""
    rng = random.Random(1)
    num_held_chars = 0
    for _ in range(1500):
        letters = rng.choice(ALPHABETS)
        stops = ["".join(rng.choices(letters, k=rng.randrange(1, 9))) for _ in range(rng.randrange(1, 5))]
        matcher = StopStringMatcher(stops, include_match=False)
        num_early = rng.choice([0, 0, 2, 5])
        text = out = ""
        for number, piece in enumerate(cut("".join(rng.choices(letters + "c", k=12)), rng)):
            new, matched = matcher.push(piece, may_match=number >= num_early)
            out, text = out + new, text + piece
            if matched is not None:
                break
            assert out == text[: len(text) - num_held(stops, text)], (stops, text)
            num_held_chars += len(text) - len(out)
    assert num_held_chars > 3000


def num_lines(work: Callable[[], object]) -> int:
    """Lines of Python that a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


HOSTILE = {
    "all begin with the output's character": (["a" + "b" * 255] * 15 + ["a" * 255 + "c"], "a" * 4000),
    "each leaves the others later": (["a" * n + "b" * (256 - n) for n in range(1, 17)], "a" * 4000),
    "broken off at the last character": (["a" * 255 + "b"], ("a" * 255 + "c") * 16),
    "broken off deep, link after link": (
        ["a" * n + "b" + "a" * (255 - n) for n in range(240, 256)],
        ("a" * 239 + "b") * 16,
    ),
    "all of one that repeats with a fault": (["ab" * n + "c" for n in range(112, 128)], "ab" * 2000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_token_costs_the_same_whatever_the_stop_strings_are(name: str) -> None:
    """In lines of Python, which no machine's load changes: 4 characters take 2 looks each at most, and what
    the automaton finds out on the way is paid for once, two looks per character of the stop strings.
    """
    stops, text = HOSTILE[name]
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    matcher = StopStringMatcher(stops, include_match=False)
    assert num_lines(lambda: [matcher.push(piece) for piece in pieces]) < 250 * len(pieces)


def test_a_request_that_opens_pays_for_the_number_of_its_stop_strings_not_their_length() -> None:
    rng = random.Random(2)
    stops = ["".join(rng.choices("ab", k=256)) for _ in range(16)]
    lines = num_lines(lambda: StopStringMatcher(stops, include_match=False))
    assert 0 < lines < 2500
    shared = num_lines(lambda: StopStringMatcher(list(stops), include_match=False))
    assert shared < 20, "the sequences of one request have one automaton"


def test_the_automaton_of_the_longest_stop_strings_is_small() -> None:
    rng = random.Random(3)
    stops = tuple("".join(rng.choices("é😀", k=256)) for _ in range(16))
    automaton = Automaton(stops)
    automaton.scan(0, "".join(stops), until_match=False)
    tables = [getattr(automaton, name) for name in automaton.__slots__]
    forks = next(table for table in tables if isinstance(table, dict))
    assert automaton.num_states > 3500
    assert len(forks) <= 2 * len(stops)
    size = sum(map(sys.getsizeof, [*tables, *forks.values()]))
    assert size < 100_000


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
