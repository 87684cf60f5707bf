"""Planted mistakes with guesses and the remains of rejected ones: see tests.harness.mutants.mutant_table."""

from __future__ import annotations

from scheduler_proc.batching.prefill_adder import PrefillAdder
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.pages.page_tables import PageTables
from scheduler_proc.committer import Committer
from scheduler_proc.core.request import Request
from scheduler_proc.core.results import LooseResults
from scheduler_proc.core.rows import Rows
from scheduler_proc.features.speculation.guessing_rows import GuessingRows
from scheduler_proc.features.speculation.speculation import Speculation, SpeculationSettings
from tests.harness.mutants.mutant_table import Mutant

GUESSING = {"speculation": SpeculationSettings(True, 4), "page_size": 4, "num_pages": 60, "max_len": 120}

TOGETHER = GUESSING | {"speculation": SpeculationSettings(True, 4, 1)}

GUESS_MUTANTS = [
    Mutant(
        "KV of a rejected guess read later",
        Committer,
        "_commit_row",
        "scheduled.start + scheduled.num_known + num_accepted",
        "scheduled.start + scheduled.num_known + num_accepted + 1",
        0,
        changes=GUESSING,
    ),
    Mutant(
        "a page of a rejected guess published",
        KVCacheManager,
        "publish",
        "min(rows.kv_len_of[row], rows.num_tokens_of[row])",
        "self.num_pages_of[row] * size",
        0,
        changes=GUESSING,
    ),
    Mutant(
        "pages of rejected guesses kept",
        KVCacheManager,
        "give_back_rejected",
        "self.num_pages[rows] > num_needed",
        "self.num_pages[rows] < 0",
        1,
        changes=GUESSING,
    ),
    Mutant(
        "the page of a rejected guess is lost",
        PageTables,
        "cut",
        ".copy()",
        ".copy()[1:]",
        0,
        changes=GUESSING,
    ),
    Mutant(
        "a stop id inside an accepted run passed over",
        Request,
        "cut",
        "self.stops_at(token, start + i)",
        "False",
        0,
        changes=GUESSING,
    ),
    Mutant(
        "guesses beyond max_tokens",
        Speculation,
        "plan_row",
        "req.num_tokens - 1",
        "req.num_tokens + 8",
        0,
        changes=GUESSING,
    ),
    Mutant(
        "tokens of an accepted run dealt off by one",
        LooseResults,
        "take_next",
        "self._token_at += count",
        "self._token_at += min(count, 1)",
        0,
        changes=GUESSING,
    ),
    Mutant(
        "accepted guesses counted with the token behind them",
        Committer,
        "_commit_row",
        "self.rows.num_accepted_of[row] += num_accepted",
        "self.rows.num_accepted_of[row] += num_accepted + 1",
        0,
        changes=GUESSING,
    ),
    Mutant(
        "guesses without pages",
        PrefillAdder,
        "reserve_guesses",
        "scheduled.guesses = scheduled.guesses[:num_fit]",
        "pass",
        10,
        changes=GUESSING | {"num_pages": 22, "max_len": 88},
    ),
    Mutant(
        "KV of guesses that were rejected together read later",
        Committer,
        "_take_back_rejected",
        "starts[rejected] + 1",
        "starts[rejected] + 2",
        0,
        changes=TOGETHER,
    ),
    Mutant(
        "guesses of many rows without pages",
        PrefillAdder,
        "_reserve_all",
        "guesses.counts[at] = num_fit[at]",
        "pass",
        2,
        changes=TOGETHER | {"num_pages": 40, "max_len": 40, "page_size": 1},
    ),
    Mutant(
        "many guesses beyond max_tokens",
        GuessingRows,
        "guess",
        "- num_tokens - 1",
        "- num_tokens + 8",
        7,
        changes=TOGETHER,
    ),
    Mutant(
        "tokens of rows that guess together dealt to others",
        Committer,
        "commit",
        "tokens = tokens[num_sampled:]",
        "pass",
        0,
        changes=TOGETHER,
    ),
    Mutant(
        "a stop id passed over where rows that guess together get as many tokens",
        Rows,
        "_put_as_many",
        "np.count_nonzero(is_stop_id)",
        "False",
        1,
        changes=TOGETHER,
    ),
    Mutant(
        "as many tokens of each row written one place on",
        Rows,
        "_put_as_many",
        "+ at] =",
        "+ at + 1] =",
        0,
        changes=TOGETHER,
    ),
]
