"""A slice of the simulation of groups, and planted mistakes that it notices:
`python -m tests.harness.simulation.group_simulation --runs 300` runs more of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from itertools import chain
from typing import Any

import pytest

from grammar_proc.branches import Branches
from scheduler_proc import committer
from scheduler_proc.batching.prefill_adder import PrefillAdder
from scheduler_proc.cache import group_pages
from scheduler_proc.cache.pages.page_allocator import PageAllocator
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import RowGroup
from scheduler_proc.core.rows import Rows
from scheduler_proc.features.beam_search.beam_history import BeamHistory
from scheduler_proc.features.beam_search.beam_search import BeamSearch
from scheduler_proc.features.beam_search.search_guide import SearchGuide
from scheduler_proc.features.beam_search.search_processors import SearchProcessors
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.waiting.width_gate import WidthGate
from tests.harness.mutants.mutant_table import Mutant
from tests.harness.mutants.mutants import in_force
from tests.harness.simulation import group_simulation
from tests.harness.simulation.sim_branches import FakeMatcher, num_matchers, number_from_now

NUM_RUNS = 12
MOST_SEEDS = 25


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_groups_among_other_requests_find_what_a_search_alone_finds() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        counts += group_simulation.run(seed)
    for what in (
        "searches",
        "searches with rules",
        "searches of several widths",
        "width changes",
        "guided searches",
        "guided searches without end tokens",
        "searches with processors",
        "processors that raised",
        "late masks",
        "grammar deaths",
        "steps of groups",
        "aborted",
        "replaced",
        "retracted",
        "held back",
        "searches with adapters",
    ):
        assert counts[what], f"the traffic has no {what}: it tests less than it says"


def test_no_attempt_is_sent_twice() -> None:
    """A search that ended in between opened again: seed 1004 aborted a replaced one and sent it once more."""
    group_simulation.run(1004)
    for seed in (3019, 3060):
        group_simulation.run(seed, guided=1.0, late=0.6)


def test_a_run_counts_no_matchers_that_an_earlier_one_left() -> None:
    left = [FakeMatcher("long")]
    number = number_from_now()
    left.append(FakeMatcher("long"))
    assert num_matchers(number) == 1
    left.clear()
    assert num_matchers(number) == 0


def mutant(
    name: str,
    owner: Any,
    attribute: str,
    old: str,
    new: str = "None",
    guided: float = 0.0,
    processed: float = 0.0,
    seed: int = 0,
) -> Mutant:
    changes = {"guided": guided, "processed": processed}
    return Mutant(name, owner, attribute, old, new, seed=seed, changes=changes)


MUTANTS = [
    mutant(
        "the page in progress is not copied",
        group_pages,
        "_fork",
        "tables.copies.append((row, table.item(src, num_full), spare))",
    ),
    mutant("shared pages are not counted", group_pages, "_fork", "kv.pages.share(wanted[num_same:])"),
    mutant(
        "the device is not told of a fork",
        group_pages,
        "_fork",
        "tables.changed(row, min(changed_from, num_full))",
    ),
    mutant(
        "pages of a dead hypothesis are kept", group_pages, "_fork", "kv.pages.free(own[num_same:].copy())"
    ),
    mutant("a fork takes no lease", group_pages, "_fork", "kv.cache.lock(source.lease)"),
    mutant(
        "tokens do not move with a fork",
        group_pages,
        "_fork",
        "rows.tokens[row, source.num_prompt : kv_len] = rows.tokens[src, source.num_prompt : kv_len]",
    ),
    mutant(
        "the page in progress is not copied where nothing else changes",
        group_pages,
        "_fork_in_place",
        "kv.tables.copies.append((row, table.item(src, num_full), spare))",
    ),
    mutant(
        "tokens do not move with a fork in place",
        group_pages,
        "_fork_in_place",
        "rows.tokens[row, source.num_prompt : kv_len] = rows.tokens[src, source.num_prompt : kv_len]",
    ),
    mutant(
        "a fork in place of a row with other pages",
        group_pages,
        "_fork_in_place",
        "table[row, first:num_full].tobytes() != table[src, first:num_full].tobytes()",
        "False",
    ),
    mutant("two beams in one row", committer, "advance_group", "kept.remove(source.row)"),
    mutant("a group goes on before all results are here", RowGroup, "has_all", "== len(self.beams)", ">= 1"),
    mutant(
        "a group that is taken back keeps rows",
        Lifecycle,
        "_give_back_row",
        "release_others(self.kv, req.group)",
    ),
    mutant(
        "a group goes on from a hypothesis of its last stay",
        Lifecycle,
        "_give_back_row",
        "req.forget_output()",
    ),
    mutant(
        "a search goes on where its last stay ended",
        BeamSearch,
        "row_opened",
        "self._hypotheses = Hypotheses(self._search)",
    ),
    mutant(
        "rows of a group overlap", BeamSearch, "row_opened", "held, True, self", "held, False, self", seed=3
    ),
    mutant(
        "rules look at the tokens of another beam",
        BeamSearch,
        "_one_by_one",
        "beam.tokens,",
        "self._req.tokens,",
    ),
    mutant(
        "a fork keeps the counts of the hypothesis whose lane it takes",
        BeamHistory,
        "_fork",
        "cells[first + token] -= 1",
    ),
    mutant(
        "a fork keeps the n-grams of the hypothesis whose lane it takes",
        BeamHistory,
        "_fork",
        "old_numbers[same:] = numbers[same:]",
        seed=12,
    ),
    mutant(
        "rules begin where the last stay of a search ended",
        BeamSearch,
        "row_opened",
        "self._ruled.begin(req.tokens[: req.num_prompt])",
    ),
    mutant(
        "a fork keeps its parent's matcher", Branches, "_go_on", "before.deep_copy()", "before", guided=1.0
    ),
    mutant(
        "a hypothesis goes on from the matcher of another one",
        SearchGuide,
        "follow",
        "FROM_THE_START if is_first else parent",
        "FROM_THE_START if is_first else 0",
        guided=1.0,
    ),
    mutant(
        "the matcher of a dead hypothesis is kept",
        Branches,
        "step",
        "search.matchers, search.followed = followed.matchers, _Followed()",
        "search.matchers, search.followed = followed.matchers + search.matchers[-1:], _Followed()",
        guided=1.0,
    ),
    mutant(
        "matchers of a search outlive it", Branches, "close", "self._searches.pop(handle, None)", guided=1.0
    ),
    mutant(
        "the grammar process is not told that a search ends",
        BeamSearch,
        "release",
        "self._guide.close()",
        guided=1.0,
    ),
    mutant(
        "late masks are not waited for",
        BeamSearch,
        "_choose",
        "not guide.is_known()",
        "False",
        guided=1.0,
    ),
    mutant(
        "a guide goes on where the last stay of its search ended",
        BeamSearch,
        "row_opened",
        "self._guide.begin()",
        guided=1.0,
    ),
    mutant(
        "a new grammar process is not told the hypotheses",
        GrammarClient,
        "_follow_up",
        "self._outbox.send(branches)",
        guided=1.0,
    ),
    mutant(
        "processors see the tokens of the hypothesis whose row was taken over",
        SearchProcessors,
        "_unseen",
        "self._sources[number]",
        "row",
        processed=1.0,
    ),
    mutant(
        "processors are told tokens of a search's last stay",
        SearchProcessors,
        "begin",
        "self._sources = None",
        processed=1.0,
    ),
    mutant(
        "a search goes on though a processor has failed",
        SearchProcessors,
        "check",
        "if sampled.error:",
        "if False:",
        processed=1.0,
    ),
    mutant(
        "a search reads what was there before its processors",
        BeamSearch,
        "_one_by_one",
        "None if self._processors is None else scores_of(sampled)",
        processed=1.0,
    ),
    mutant(
        "a complete output that nothing may follow is lost",
        BeamSearch,
        "_choose",
        "self._hypotheses.end(over)",
        guided=1.0,
    ),
    mutant("another width does not wait", WidthGate, "may_start", "req.width == self._width", "True", seed=5),
    mutant(
        "the order is not that of arrival", WidthGate, "in_order", "heappop(order)", "order.pop()", seed=5
    ),
    mutant("other sequences get no terminal", BeamSearch, "closing", "self._output.close(other)"),
    mutant("owners are not taken off", PageAllocator, "_let_go", "self.num_more_owners[each] = left"),
    mutant("rows of groups count as requests", Rows, "acquire", "self._num_further += req.head is not req"),
    mutant(
        "a group goes on without pages",
        PrefillAdder,
        "_try_reserve_group",
        "if not self._kv.try_reserve_next(rows)",
        "if False",
    ),
]


def first_to_notice(planted: Mutant) -> int | None:
    """Return the seed whose run notices it; None: none does."""
    with in_force(planted):
        for seed in chain(range(planted.seed, MOST_SEEDS), range(planted.seed)):
            try:
                group_simulation.run(seed, **planted.changes)
            except Exception:
                return seed
    return None


@pytest.mark.parametrize("planted", MUTANTS, ids=lambda planted: planted.name)
def test_a_planted_mistake_is_noticed(planted: Mutant) -> None:
    assert first_to_notice(planted) is not None
