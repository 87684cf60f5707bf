"""Stop words: the first complete match of ids or text, and nothing held back without a reason."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from detokenizer_proc.stop_strings import StopStringMatcher
from detokenizer_proc.stop_words import StopWordMatcher, automaton_of
from runtime.text.incremental import DecoderFactory
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import pack_ids
from runtime.wire.messages import Closed, CloseReason, Resume, StopMatched
from tests.harness.ring.detokenizer_ring import EOS, Ring, logprobs

Ids = tuple[int, ...]


@pytest.fixture
def ring(demo: Tokenizer) -> Ring:
    return Ring(demo)


def name_of(word: Sequence[int]) -> str:
    return " ".join(map(str, word))


def matcher_of(
    words: Sequence[Ids], strings: Sequence[str] = (), *, include: bool = False
) -> StopWordMatcher:
    return StopWordMatcher(
        tuple(pack_ids(word) for word in words),
        include_match=include,
        strings=StopStringMatcher(strings, include_match=include) if strings else None,
        word_text=name_of,
    )


def ending(tokens: Sequence[int], words: Sequence[Ids]) -> Ids:
    """The longest word that the tokens end in, () for none."""
    return max((word for word in words if tuple(tokens[-len(word) :]) == word), key=len, default=())


# -- the matcher ---------------------------------------------------------------------------------------------


def reference(
    tokens: Sequence[int],
    pieces: Sequence[str],
    words: Sequence[Ids],
    strings: Sequence[str],
    *,
    include: bool,
    min_tokens: int,
) -> tuple[str, str | None, int]:
    """(text, what ends it, tokens up to there), by everything so far after each token."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        begin, text = len(text), text + piece
        if count <= min_tokens:
            continue
        for end in range(begin + 1, len(text) + 1):
            found = [string for string in strings if text[:end].endswith(string)]
            if found:
                string = max(found, key=len)
                return text[: end if include else end - len(string)], string, count
        word = ending(tokens[:count], words)
        if word:
            start = len("".join(pieces[: count - len(word)]))
            return text if include else text[:start], name_of(word), count
    return text, None, len(pieces)


def held_by_words(tokens: Sequence[int], words: Sequence[Ids]) -> int:
    """Tokens of the longest end that is the beginning of a word and not all of it."""
    for count in range(len(tokens), 0, -1):
        end = tuple(tokens[-count:])
        if any(len(word) > count and word[:count] == end for word in words):
            return count
    return 0


@pytest.mark.parametrize("seed", range(4))
def test_any_tokens_stop_at_the_first_match_of_words_and_strings(seed: int) -> None:
    rng = random.Random(seed)
    num_words = num_strings = 0
    for _ in range(1500):
        words = [tuple(rng.choices(range(3), k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        strings = ["".join(rng.choices("ab", k=rng.randrange(2, 5))) for _ in range(rng.randrange(3))]
        tokens = rng.choices(range(4), k=rng.randrange(1, 14))
        pieces = ["".join(rng.choices("abc", k=rng.randrange(3))) for _ in tokens]
        include, min_tokens = rng.random() < 0.3, rng.choice([0, 0, 2, 5])
        expected = reference(tokens, pieces, words, strings, include=include, min_tokens=min_tokens)
        matcher = matcher_of(words, strings, include=include)
        text, matched, count = "", None, 0
        while matched is None and count < len(tokens):
            may_match = count + 1 > min_tokens
            new, matched = matcher.push(tokens[count], pieces[count], may_match=may_match)
            text, count = text + new, count + 1
        if matched is None:
            text += matcher.flush()
        assert (text, matched, count) == expected, (words, strings, tokens, pieces)
        num_words += matched is not None and matched[0].isdigit()
        num_strings += matched is not None and not matched[0].isdigit()
    assert num_words > 300
    assert num_strings > 100


def test_text_is_held_back_from_where_a_word_may_have_begun_and_not_before() -> None:
    rng = random.Random(9)
    for _ in range(800):
        words = [tuple(rng.choices(range(2), k=rng.randrange(2, 6))) for _ in range(rng.randrange(1, 4))]
        tokens = rng.choices(range(3), k=12)
        matcher = matcher_of(words)
        text = ""
        for count, token in enumerate(tokens, 1):
            new, _ = matcher.push(token, str(token), may_match=False)
            text += new
            assert len(text) == count - held_by_words(tokens[:count], words), (words, tokens[:count])
        assert text + matcher.flush() == "".join(map(str, tokens))


def test_a_word_that_overlaps_itself_is_found_at_its_first_end() -> None:
    matcher = matcher_of([(1, 1, 2)])
    pushed = [matcher.push(token, str(token), may_match=True) for token in (1, 1, 1, 2)]
    assert pushed == [("", None), ("", None), ("1", None), ("", "1 1 2")]


def test_a_word_inside_another_ends_the_text_first() -> None:
    matcher = matcher_of([(1, 2, 3, 4), (2, 3)])
    assert [matcher.push(token, str(token), may_match=True) for token in (1, 2, 3)][-1] == ("1", "2 3")


def test_of_two_words_that_end_together_the_longer_is_the_match() -> None:
    matcher = matcher_of([(3,), (2, 3), (9, 9)])
    assert [matcher.push(token, str(token), may_match=True) for token in (1, 2, 3)] == [
        ("1", None),
        ("", None),
        ("", "2 3"),
    ]


def test_a_word_of_one_token_holds_nothing_back() -> None:
    matcher = matcher_of([(7,)])
    assert matcher.push(1, "a", may_match=True) == ("a", None)
    assert matcher.push(7, "b", may_match=False) == ("b", None)
    assert matcher.push(7, "c", may_match=True) == ("", "7")


def test_a_stop_string_in_the_text_of_a_pending_word_is_the_earlier_match() -> None:
    matcher = matcher_of([(1, 2)], ["ab"])
    assert matcher.push(1, "xab", may_match=True) == ("x", "ab")


def test_a_word_takes_its_text_from_what_strings_hold_back() -> None:
    matcher = matcher_of([(2, 3)], ["abcd"])
    assert matcher.push(1, "xa", may_match=True) == ("x", None)
    assert matcher.push(2, "b", may_match=True) == ("", None)
    assert matcher.push(3, "c", may_match=True) == ("a", "2 3")


def test_the_end_of_the_text_may_complete_a_string_behind_pending_ids() -> None:
    matcher = matcher_of([(1, 2)], ["b!"])
    assert matcher.push(1, "ab", may_match=True) == ("", None)
    assert matcher.push_end("!", may_match=True) == ("a", "b!")
    other = matcher_of([(1, 2)], ["b!"])
    other.push(1, "ab", may_match=True)
    assert other.push_end("?", may_match=True) == ("ab?", None)


def test_words_that_overlap_themselves_to_the_last_token_are_found_where_they_end() -> None:
    """The longest and the most there may be; a step after thousands of others is right, too."""
    words = [(1,) * count + (2,) * (64 - count) for count in range(64)]
    matcher = matcher_of(words)
    for number in range(3000):
        assert matcher.push(1 if number % 64 else 3, "", may_match=True)[1] is None
    for _ in range(63):
        assert matcher.push(1, "", may_match=True)[1] is None
    assert matcher.push(2, "", may_match=True)[1] == name_of(words[63])


def test_sequences_with_the_same_words_share_one_automaton() -> None:
    words = (pack_ids([5, 6]), pack_ids([7]))
    assert automaton_of(words) is automaton_of(tuple(bytes(word) for word in words))


# -- a sequence ----------------------------------------------------------------------------------------------


def words_of(ring: Ring, *texts: str) -> tuple[bytes, ...]:
    return tuple(pack_ids(ring.ids(text)) for text in texts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_word_ends_the_text_and_its_ids_and_usage_go_through_it(
    ring: Ring, include: bool, stream: bool
) -> None:
    word = " import os\n"
    handle = ring.open(
        ring.handle(),
        stream=stream,
        stop_words=words_of(ring, "return x", word),
        include_stop_str_in_output=include,
    )
    ids = ring.ids("x = 1") + ring.ids(word)
    assert len(ring.ids(word)) > 1
    for token in ids:
        ring.step((handle, token))
    assert ring.scheduler.drain() == [StopMatched(handle, len(ids))]
    ring.generate(handle, "overrun")
    ring.close(handle, "stop_string")
    finish = ring.terminal(handle)
    assert ring.text(handle) == "x = 1" + (word if include else "")
    assert (finish.reason, finish.matched) == ("stop", word)
    assert ring.token_ids(handle) == ids
    assert finish.usage.completion_tokens == len(ids)


def test_text_that_only_began_a_stop_word_comes_when_that_is_clear_or_with_the_terminal(ring: Ring) -> None:
    begin, end = 70, 71
    handle = ring.open(ring.handle(), stop_words=(pack_ids([begin, end]),))
    piece = ring.tokenizer.decode([begin])
    ring.step((handle, begin))
    assert (ring.text(handle), ring.token_ids(handle)) == ("", [begin])
    ring.step((handle, 72), (handle, begin))
    assert ring.text(handle) == piece + ring.tokenizer.decode([72])
    ring.close(handle)
    assert ring.text(handle) == ring.tokenizer.decode([begin, 72, begin])
    assert ring.terminal(handle).reason == "length"


def test_stop_words_are_ignored_before_min_tokens(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stop_words=(pack_ids([70, 71]),), min_tokens=2)
    ring.step((handle, 70), (handle, 71), (handle, 70), (handle, 71), (handle, 72))
    assert ring.text(handle) == ring.tokenizer.decode([70, 71])
    assert ring.token_ids(handle) == [70, 71, 70, 71]
    assert ring.scheduler.drain() == [StopMatched(handle, 4)]


def test_a_stop_word_of_special_tokens_is_told_by_their_text(ring: Ring) -> None:
    special = 1
    handle = ring.open(ring.handle(), stop_words=(pack_ids([special]),))
    ring.step((handle, 70), (handle, special))
    ring.close(handle, "stop_string")
    assert ring.text(handle) == ring.tokenizer.decode([70])
    assert ring.terminal(handle).matched == ring.tokenizer.decode([special], skip_special_tokens=False)


def test_a_stop_word_may_end_with_the_stop_token(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stop_words=(pack_ids([70, EOS]),))
    ring.step((handle, 75), (handle, 70))
    ring.step((handle, EOS), closed=(Closed(handle, "stop", stop_token=EOS),))
    assert ring.text(handle) == ring.tokenizer.decode([75])
    assert ring.terminal(handle).matched == ring.tokenizer.decode([70, EOS], skip_special_tokens=False)
    assert ring.terminal(handle).usage.completion_tokens == 3


@pytest.mark.parametrize("reason", ["length", "abort", "stop", "timeout"])
def test_a_stop_word_in_the_output_goes_before_the_scheduler_s_reason(
    ring: Ring, reason: CloseReason
) -> None:
    handle = ring.open(ring.handle(), stop_words=(pack_ids([70]),))
    ring.step((handle, 70), closed=(Closed(handle, reason),))
    assert ring.terminal(handle).reason == "stop"


def test_logprobs_go_through_the_stop_word(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stop_words=(pack_ids([70, 71]),))
    ring.step((handle, 70), (handle, 71), (handle, 72), logprobs=(logprobs(handle, [-1.0, -2.0, -4.0]),))
    ring.close(handle, "stop_string")
    assert ring.terminal(handle).cumulative_logprob == -3.0


def test_words_that_are_no_ids_fail_their_sequence_alone(ring: Ring) -> None:
    bad, good = ring.handle(0), ring.open(ring.handle(1))
    ring.open(bad, stop_words=(b"abc",))
    ring.generate(good, "x")
    assert ring.terminal(bad).reason == "error"
    assert ring.text(good) == "x"


def test_a_sequence_with_words_and_strings_ends_the_same_when_it_was_resumed(ring: Ring) -> None:
    """Random tokens, split anywhere: what both attempts deliver is what one would have."""
    rng = random.Random(4)
    num_matches = 0
    for number in range(80):
        ids = rng.choices([*range(70, 76), *ring.ids("😀ab")], k=rng.randrange(1, 14))
        words = [tuple(rng.choices(range(70, 74), k=rng.randrange(1, 4))) for _ in range(2)]
        strings = (ring.tokenizer.decode(rng.choices(range(70, 76), k=2)),)
        min_tokens = rng.choice([0, 0, 3])
        decoder = DecoderFactory(ring.tokenizer).open([5])
        pieces = [decoder.push(token) for token in ids]
        text, matched, count = reference(ids, pieces, words, strings, include=False, min_tokens=min_tokens)
        if matched is None and decoder.flush():
            continue  # the end of the text, which the reference does not know
        num_matches += matched is not None
        fields: dict[str, Any] = {
            "stop": strings,
            "stop_words": tuple(pack_ids(word) for word in words),
            "min_tokens": min_tokens,
        }
        split = rng.randrange(count + 1)
        first = ring.open(ring.handle(number), **fields)
        ring.step(*((first, token) for token in ids[:split]))
        again, sent = ring.handle(number, attempt=1), len(ring.text(first))
        ring.open(again, resume=Resume(pack_ids(ids[:split]), sent), **fields)
        ring.step(*((again, token) for token in ids[split:]), closed=(Closed(again, "length"),))
        assert ring.text(first) + ring.text(again) == text, (ids, words, strings, split)
        names = {name_of(word): ring.tokenizer.decode(word) for word in words}
        assert ring.terminal(again).matched == (matched and names.get(matched, matched))
        assert ring.terminal(again).usage.completion_tokens == count
    assert num_matches > 15
