"""NgramIndex against a search through the whole sequence."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from scheduler_proc.features.speculation.ngram_index import LONG_RUN, MAX_BULK, MAX_NGRAM, NgramIndex
from tests.harness.cases import for_each

ROOMY = 1 << 15
"""Tokens that a table has room for, so that hardly any slot is taken twice."""


def search(tokens: list[int], end: list[int] | None = None) -> int:
    """Find what `find` must return, by looking at every position."""
    text = "".join(map(chr, tokens))
    ngram = "".join(map(chr, tokens if end is None else end))[-MAX_NGRAM:]
    for start in range(len(ngram)):
        at = text.rfind(ngram[start:], 0, len(text) - 1)
        if at >= 0:
            return at + len(ngram) - start
    return -1


def index_of(tokens: list[int]) -> NgramIndex:
    return NgramIndex(np.array(tokens, np.int32), ROOMY)


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_found_and_of_these_the_last(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = rng.choice([2, 3, 10, 50])
    tokens = [rng.randrange(vocabulary) for _ in range(rng.randrange(60))]
    index = index_of(tokens)
    differing = 0
    for _ in range(60):
        new = [rng.randrange(vocabulary) for _ in range(rng.choice([1, 1, 2, 5, 20]))]
        index.extend(new)
        tokens += new
        assert index.tokens.tolist() == tokens
        differing += index.find() != search(tokens)
        other = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, MAX_NGRAM + 1))]
        differing += index.find(index_of(other)) != search(tokens, other)
    assert differing <= 2, "more than a slot that was taken twice explains"


@for_each("seed", range(5))
def test_what_is_found_is_a_match_however_small_the_table(seed: int) -> None:
    rng = random.Random(seed)
    index = NgramIndex(np.array([], np.int32), 4)
    num_found = 0
    for _ in range(400):
        index.extend([rng.randrange(6)])
        at = index.find()
        if at >= 0:
            num_found += 1
            assert index.tokens[at - 1] == index.tokens[-1]
            assert at < len(index.tokens)
    assert num_found


def test_where_the_match_runs_into_the_end_the_sequence_goes_round() -> None:
    index = index_of([9, 1, 2, 3, 1, 2, 3])
    assert index.find() == 4
    assert index.following(4, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_of_a_long_prompt_the_end_is_looked_through() -> None:
    tokens = np.arange(2 * MAX_BULK, dtype=np.int32)
    index = NgramIndex(tokens, len(tokens) + 10)
    index.extend([2 * MAX_BULK - 100])
    assert index.find() == 2 * MAX_BULK - 99
    index.extend([5])
    assert index.find() == -1


def test_a_step_costs_no_more_in_a_long_sequence() -> None:
    """Twenty times the length, in CPU time with a wide margin for a machine that does something else."""

    def best_of(length: int) -> float:
        index = NgramIndex(np.arange(length, dtype=np.int32) % 5000, length + 4000)
        times = []
        for _ in range(20):
            began = time.thread_time()
            for token in range(100):
                index.extend([token])
                index.find()
            times.append(time.thread_time() - began)
        return min(times) / 100

    assert best_of(20_000) < 4 * best_of(1000) + 5e-6


def grow(index: NgramIndex, tokens: list[int], num_guesses: int = 3) -> int:
    """Guess and verify these tokens as a row does. Returns how many guesses were wrong."""
    num_wrong, rest = 0, tokens
    while rest:
        guesses = index.guess(min(num_guesses, len(rest) - 1))
        num_right = 0
        while num_right < len(guesses) and guesses[num_right] == rest[num_right]:
            num_right += 1
        num_wrong += len(guesses) - num_right
        new, rest = rest[: num_right + 1], rest[num_right + 1 :]
        if not index.follow(new, len(guesses)):
            index.extend(new)
    return num_wrong


def test_a_long_repetition_is_followed_without_a_look_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    block = list(range(100, 302))
    index, num_looks, find = index_of([*block, 1, 2]), 0, NgramIndex.find

    def counted(looking: NgramIndex) -> int:
        nonlocal num_looks
        num_looks += 1
        return find(looking)

    monkeypatch.setattr(NgramIndex, "find", counted)
    assert 0 < grow(index, [*block, 3, 4]) <= 3
    assert index.tokens.tolist() == [*block, 1, 2, *block, 3, 4]
    assert num_looks < 2 + LONG_RUN / 2
    before = num_looks
    grow(index, [100, 101])
    assert num_looks > before


def test_of_a_long_repetition_its_beginning_is_noted() -> None:
    block = list(range(100, 300))
    index = index_of([*block, 1, 2])
    grow(index, [*block, 3, 4])
    for at in (10, LONG_RUN - MAX_NGRAM):
        assert index.find(index_of(block[at : at + MAX_NGRAM])) == len(block) + 2 + at + MAX_NGRAM
    for at in (2 * LONG_RUN, 100, 180):
        assert index.find(index_of(block[at : at + MAX_NGRAM])) == at + MAX_NGRAM
    assert index.find(index_of(block[-MAX_NGRAM:])) == 2 * len(block) + 2


def test_of_copies_that_end_otherwise_the_newest_is_followed() -> None:
    block = list(range(100, 302))
    index = index_of([*block, 1, 2])
    assert 0 < grow(index, [*block, 3, 4]) <= 3
    assert grow(index, [*block, 3, 4]) == 0
    assert 0 < grow(index, [*block, 5, 6]) <= 6


@pytest.mark.parametrize("seed", range(4))
def test_guesses_are_what_followed_some_longest_match(seed: int) -> None:
    """Also where one is followed on: it is longer than any that is looked for. A slot that was taken twice is
    a match lost.
    """
    rng = random.Random(seed)
    blocks = [[rng.randrange(40) for _ in range(rng.choice([3, 20, 90]))] for _ in range(4)]
    tokens = [token for _ in range(12) for token in rng.choice(blocks)]
    index, num_guessed, num_shorter, rest = index_of([]), 0, 0, tokens
    while rest:
        done = index.tokens.tolist()
        guesses = list(index.guess(4))
        if guesses:
            at = index.found
            n = next(n for n in range(MAX_NGRAM, 0, -1) if search_exactly(done, n))
            num_shorter += done[at - n : at] != done[-n:]
            num_guessed += 1
        num_right = 0
        while num_right < min(len(guesses), len(rest) - 1) and guesses[num_right] == rest[num_right]:
            num_right += 1
        new, rest = rest[: num_right + 1], rest[num_right + 1 :]
        if not index.follow(new, len(guesses)):
            index.extend(new)
    assert index.tokens.tolist() == tokens
    assert num_guessed > 20
    assert num_shorter <= 1


def search_exactly(tokens: list[int], n: int) -> bool:
    """Return True if the last n tokens have come up before."""
    return any(tokens[at - n : at] == tokens[-n:] for at in range(n, len(tokens)))
