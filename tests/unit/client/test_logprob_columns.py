"""LogprobColumns: log-probabilities as they came, which read like a list of entries."""

from __future__ import annotations

import gc
import itertools
import pickle
import random

import pytest

from carousel.client.core.logprobs import TokenLogprob, packed_logprobs

NUM_TOP = 3


def entries(
    count: int, num_top: int = NUM_TOP, num_none: int = 0, *, ranks: bool = False
) -> list[TokenLogprob | None]:
    return [None] * num_none + [
        TokenLogprob(
            number,
            -0.5 * number,
            tuple((number + each, -1.0 * each) for each in range(num_top)),
            number + 2 if ranks else None,
        )
        for number in range(count)
    ]


def test_they_read_like_a_list() -> None:
    for shape in itertools.product([0, 1, 7], [0, 1, 4], [0, 1, NUM_TOP], [False, True]):
        check_like_a_list(*shape)


def check_like_a_list(count: int, num_none: int, num_top: int, ranks: bool) -> None:
    expected = entries(count, num_top, num_none, ranks=ranks)
    columns = packed_logprobs(expected)
    assert len(columns) == len(expected)
    assert list(columns) == list(iter(columns)) == expected
    assert columns == expected
    assert expected == columns
    assert columns == packed_logprobs(expected)
    assert bool(columns) == bool(expected)
    assert repr(columns) == repr(expected)
    for place in range(-len(expected), len(expected)):
        assert columns[place] == expected[place]
    for place in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            columns[place]
    rng = random.Random(0)
    for _ in range(60):
        start, stop = (rng.choice((None, *range(-12, 13))) for _ in range(2))
        each = slice(start, stop, rng.choice((None, 1, 2, -1)))
        assert columns[each] == expected[each], each
    assert columns + expected == expected + columns == [*expected, *expected]
    assert pickle.loads(pickle.dumps(columns)) == expected


@pytest.mark.parametrize("ranks", [False, True])
def test_they_grow_and_slices_do_not(ranks: bool) -> None:
    expected = entries(9, num_none=2, ranks=ranks)
    columns = packed_logprobs(expected[:3])
    before = columns[:]
    for start, stop in ((3, 4), (4, 4), (4, 11)):
        following = packed_logprobs(expected[start:stop])
        columns.extend(following)
        assert following == expected[start:stop], "it is not changed"
    assert columns == expected
    assert before == expected[:3]
    beginning = packed_logprobs([None])
    beginning.extend(packed_logprobs(expected[1:]))
    assert beginning == [None, *expected[1:]]


def test_what_differs_is_not_equal() -> None:
    columns = packed_logprobs(entries(3))
    assert columns != entries(4)
    assert columns != entries(3, num_top=2)
    assert columns != [None, *entries(3)[1:]]
    assert columns != 3


def test_they_are_few_objects_however_many_they_are() -> None:
    """Those of a prompt of 1,000 tokens were 22,000, through which each full garbage collection went."""
    expected = entries(1000, 20, num_none=1)
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        columns = packed_logprobs(expected)
        kept = [columns[start : start + 97] for start in range(0, len(columns), 97)]
        assert gc.get_count()[0] - before < 10 * len(kept)
    finally:
        gc.enable()
