"""Guesses for many rows at once are those for each of them alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.wire.messages import DraftCounts, TokenizedRequest
from scheduler_proc.core.row_columns import RowColumns
from scheduler_proc.features.speculation.draft_length import DraftLength, DraftLengths
from scheduler_proc.features.speculation.guessing_rows import GuessingRows
from scheduler_proc.features.speculation.ngram_index import NgramIndex
from scheduler_proc.features.speculation.ngram_table import NgramTable
from scheduler_proc.features.speculation.speculation import SpeculationSettings
from scheduler_proc.features.speculation.step_cost import StepCost
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running

NUM_ROWS = 12


def requests_that_repeat(rng: random.Random) -> list[TokenizedRequest]:
    """Few ids are allowed, so n-grams are found, and often right; some stop at one of them."""
    requests = []
    for number in range(60):
        ids = (3, 3 + number % 3)
        sampling: dict[str, Any] = {"allowed_token_ids": ids}
        if number % 3 == 0:
            sampling["stop_token_ids"] = (ids[1],)
        if number % 4 == 0:
            sampling["min_tokens"] = 5
        if number % 5 == 0:
            sampling["logprobs"] = 1
        prompt = rng.choices(ids, k=rng.randrange(1, 12))
        requests.append(message(number, prompt, 1 + rng.randrange(30), sampling=sampling))
    return requests


def requests_that_go_round(rng: random.Random) -> list[TokenizedRequest]:
    """Return requests to a model that sees two tokens. Their output goes round, until
    `no_repeat_ngram_size` tokens would come again.
    """
    requests = []
    for number in range(14):
        sampling = {
            "allowed_token_ids": (3, 5, 7 + number % 3),
            "no_repeat_ngram_size": 56 + number % 9,
        }
        prompt = rng.choices((3, 5), k=rng.randrange(1, 12))
        requests.append(message(number, prompt, 150 + rng.randrange(40), sampling=sampling))
    return requests


class Outcome(dict[bytes, tuple[list[int], str, DraftCounts | None]]):
    """Output, reason of the end and counts of each request."""


def outcome(
    min_together: int,
    seed: int,
    make_requests: Callable[[random.Random], list[TokenizedRequest]] = requests_that_repeat,
    **changes: Any,
) -> tuple[Outcome, int]:
    """Outcome of the requests, and the rows whose guesses were made at once."""
    rng = random.Random(seed)
    requests = make_requests(rng)
    settings = SpeculationSettings(True, 4, min_together)
    num_together = 0
    with running(**{"speculation": settings, "max_rows": NUM_ROWS, "max_len": 48} | changes) as system:
        cost, guesser = system.scheduler.step_cost, system.rows.guesser
        assert cost is not None
        assert isinstance(guesser, GuessingRows)
        cost.most, cost.note_step = 4, lambda *_: None  # type: ignore[method-assign]
        guess = guesser.guess

        def counted(rows: Any) -> Any:
            nonlocal num_together
            num_together += len(rows)
            return guess(rows)

        guesser.guess = counted  # type: ignore[method-assign]
        run_until_idle(system, *requests, max_steps=20_000)
        tokens, closed = system.detokenizer.tokens, system.detokenizer.closed
        ended = Outcome(
            {r.handle: (tokens[r.handle], closed[r.handle].reason, closed[r.handle].drafts) for r in requests}
        )
        return ended, num_together


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 8))])
@pytest.mark.parametrize("changes", [{"depth": 1}, {"depth": 3}, {"num_pages": 30, "depth": 2}])
def test_output_and_guesses_are_those_of_rows_taken_alone(seed: int, changes: dict[str, Any]) -> None:
    """Short of pages rows go and come back in another order, so there the outputs alone are the same. Rows
    that become too few are taken alone in the middle of their output.
    """
    alone, none_together = outcome(1000, seed, budget=256, **changes)
    together, num_together = outcome(1, seed, budget=256, **changes)
    both_ways, num_some = outcome(4, seed, budget=256, **changes)
    assert none_together == 0
    assert num_together > num_some > 50
    for handle, (tokens, reason, counts) in alone.items():
        for other in (together, both_ways):
            assert other[handle][:2] == (tokens, reason)
            if "num_pages" not in changes:
                assert other[handle][2] == counts
    assert sum(counts.num_accepted for _, _, counts in together.values() if counts is not None) > 100


@pytest.mark.parametrize("depth", [1, 3])
def test_rows_are_followed_together_as_they_are_alone(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_followed, pass_over = 0, NgramTable.pass_over

    def counted(table: NgramTable, rows: Any) -> None:
        nonlocal num_followed
        num_followed += len(rows)
        pass_over(table, rows)

    monkeypatch.setattr(NgramTable, "pass_over", counted)
    changes = {"window": 2, "max_len": 224, "page_size": 16, "num_pages": 200, "depth": depth, "budget": 256}
    alone, _ = outcome(1000, depth, requests_that_go_round, **changes)
    assert num_followed == 0
    together, _ = outcome(1, depth, requests_that_go_round, **changes)
    assert num_followed > 50
    both_ways, _ = outcome(8, depth, requests_that_go_round, **changes)
    assert alone == together == both_ways


def test_guesses_leave_half_of_the_budget_to_prompts() -> None:
    expected, _ = outcome(1000, 3, budget=256, depth=1)
    for budget in (13, 20):
        found, num_together = outcome(1, 3, budget=budget, depth=1)
        assert num_together > 50
        assert {key: value[:2] for key, value in found.items()} == {
            key: value[:2] for key, value in expected.items()
        }


def test_rows_with_room_for_less_than_an_ngram_guess_alone() -> None:
    settings = SpeculationSettings(True, 4, min_together=1)
    requests = [message(number, [7, 7, 7], 3) for number in range(NUM_ROWS)]
    with running(speculation=settings, max_rows=NUM_ROWS, max_len=6) as system:
        assert system.rows.guesser is None
        run_until_idle(system, *requests)
        assert all(len(system.detokenizer.tokens[r.handle]) == 3 for r in requests)


# -- the parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_table_finds_what_an_index_of_each_row_finds(seed: int) -> None:
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    vocabulary = draw.choice([1, 2, 3, 30])
    rows = RowColumns(NUM_ROWS, 512)
    table = NgramTable(rows)
    indexes = []
    for row in range(NUM_ROWS):
        num_tokens = draw.choice([0, 1, 5, 60])
        rows.tokens[row, :num_tokens] = rng.integers(0, vocabulary, num_tokens)
        rows.num_tokens[row] = num_tokens
        prompt = rows.tokens[row, :num_tokens]
        table.join(row, NgramIndex(prompt, 512, table.of_row(row)))
        indexes.append(NgramIndex(prompt, 512))
    num_found = 0
    for _ in range(40):
        chosen = np.array(sorted(draw.sample(range(NUM_ROWS), draw.randint(1, NUM_ROWS))))
        for row in chosen.tolist():
            new = rng.integers(0, vocabulary, draw.choice([1, 1, 3, 9]), dtype=np.int32)
            at = rows.num_tokens.item(row)
            rows.tokens[row, at : at + len(new)] = new
            rows.num_tokens[row] += len(new)
            indexes[row].extend(new.tolist())
        found = table.update(chosen)
        assert found.tolist() == [indexes[row].find() for row in chosen.tolist()]
        following = table.following(chosen, found, 5)
        for row, at, ids in zip(chosen.tolist(), found.tolist(), following.T.tolist(), strict=True):
            if at >= 0:
                num_found += 1
                assert ids == indexes[row].following(at, 5)
    assert num_found > 50


def test_an_index_goes_on_where_the_table_has_been() -> None:
    rows = RowColumns(2, 64)
    table = NgramTable(rows)
    rows.tokens[1, :4] = (1, 2, 3, 4)
    rows.num_tokens[1] = 4
    index, reference = NgramIndex(rows.tokens[1, :4], 64, table.of_row(1)), NgramIndex(rows.tokens[1, :4], 64)
    table.join(1, index)
    rows.tokens[1, 4:7] = (9, 1, 2)
    rows.num_tokens[1] = 7
    assert table.update(np.array([1])).tolist() == [2]
    table.leave(1, index)
    reference.extend([9, 1, 2])
    for each in (index, reference):
        each.extend([3, 4, 9])
    assert index.find() == reference.find() == 5
    assert index.tokens == reference.tokens


@pytest.mark.parametrize("seed", range(4))
def test_columns_learn_what_each_row_learns_alone(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [DraftLength(draw.random()) for _ in range(NUM_ROWS)]
    columns, rows = DraftLengths(NUM_ROWS), np.arange(NUM_ROWS)
    for row, length in enumerate(lengths):
        columns.put(row, length)
    right = [draw.choice([0.0, 0.4, 1.0]) for _ in lengths]
    most = np.array([draw.choice([0, 1, 4, 64]) for _ in lengths], np.int32)
    num_tries = 0
    for _ in range(300):
        bar, least = draw.choice([0.1, 0.5, 1.2]), draw.choice([0.0, 0.0, 0.7])
        counts = columns.num_drafts(rows, most, bar, least)
        expected = [
            each.num_drafts(own, bar, least) for each, own in zip(lengths, most.tolist(), strict=True)
        ]
        assert counts.tolist() == expected
        num_right = [sum(draw.random() < p for _ in range(n)) for n, p in zip(expected, right, strict=True)]
        accepted = np.array(num_right)
        columns.note(rows, counts, accepted)
        for length, count, num in zip(lengths, expected, accepted.tolist(), strict=True):
            num_tries += count == 1
            length.note_verified(count, num) if count else length.note_without()
    assert num_tries > 20


def test_the_rate_of_all_is_the_same_told_of_one_row_or_of_several() -> None:
    draw, one, all_at_once = random.Random(2), StepCost(), StepCost()
    for step in range(50):
        drafted = [draw.randint(1, 5) for _ in range(NUM_ROWS)]
        accepted = [draw.randint(0, most) for most in drafted]
        num_wrong = 0
        for pair in zip(drafted, accepted, strict=True):
            one.note_verified(*pair)
            num_wrong += pair[1] < pair[0]
        all_at_once.note_all_verified(sum(accepted), num_wrong)
        if step % 3 == 0:
            assert all_at_once.rate == one.rate
        else:
            one.note_step(1, 1, 0.1)
            all_at_once.note_step(1, 1, 0.1)


def test_the_rate_of_all_follows_the_newest_steps() -> None:
    """Also while no request comes, which would ask for it."""
    cost = StepCost()
    for _ in range(200):
        cost.note_verified(4, 4)
        cost.note_step(1, 4, 0.1)
    for _ in range(200):
        cost.note_verified(4, 0)
        cost.note_step(1, 4, 0.1)
    assert cost.rate < 0.02


def test_tokens_behind_a_stop_id_or_the_limit_are_not_appended() -> None:
    rows = RowColumns(4, 32)
    rows.num_tokens[:] = (3, 3, 5, 3)
    rows.max_len[:] = (20, 20, 7, 20)
    rows.min_len[:] = (0, 5, 0, 0)
    rows.in_flight[:] = 1
    rows.stop_ids[0] = 9
    tokens = np.array([1, 9, 2, 9, 1, 9, 9, 1, 2, 3, 4], np.int32)
    kept, left, ended, stopped = rows.append_several(np.arange(4), tokens, np.array([3, 4, 3, 1]))
    assert kept.tolist() == [2, 3, 2, 1]
    assert left.tolist() == [1, 9, 9, 1, 9, 1, 2, 4]
    assert ended.tolist() == [True, True, True, False]
    assert stopped.tolist() == [True, True, False, False]
    assert rows.num_tokens.tolist() == [5, 6, 7, 4]
    assert rows.tokens[1, 3:7].tolist() == [9, 1, 9, 0]
    assert rows.in_flight.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("counts", [(2, 2, 2), (2, 1, 2)])
def test_tokens_are_appended_alike_to_rows_with_as_many_and_with_others(counts: tuple[int, ...]) -> None:
    rows = RowColumns(3, 16)
    rows.num_tokens[:] = (3, 0, 5)
    rows.max_len[:] = (16, 16, 7)
    rows.stop_ids[0] = 9
    tokens = np.arange(1, 1 + sum(counts), dtype=np.int32)
    kept, left, ended, stopped = rows.append_several(np.array([2, 0, 1]), tokens, np.array(counts))
    assert tuple(kept.tolist()) == counts
    assert left.tolist() == tokens.tolist()
    assert ended.tolist() == [True, False, False]
    assert not stopped.any()
    given = iter(tokens.tolist())
    for row, start, count in zip((2, 0, 1), (5, 3, 0), counts, strict=True):
        expected = [0] * start + [next(given) for _ in range(count)]
        assert rows.tokens[row].tolist() == expected + [0] * (16 - len(expected))
        assert rows.num_tokens.item(row) == len(expected)
