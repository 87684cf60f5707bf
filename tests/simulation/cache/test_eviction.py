"""Eviction policies and retention when pages are short, through the whole scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.base.errors import ConfigError
from runtime.wire.format import pack_ids
from runtime.wire.retention import RetainedRange, Retention
from scheduler_proc.cache.pages.retained_pages import retained_pages
from scheduler_proc.cache.radix.eviction import Run, make_eviction_policy
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import System

# Room for three prompts of four pages and six more.
POOL = {"page_size": 4, "num_pages": 18, "max_rows": 1, "max_len": 72}
A, B, C = ([start] * 16 for start in (10, 20, 30))


class Traffic:
    """Requests one after the other, numbered as they come."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.number = 0

    def ask(self, prompt: list[int], **fields: Any) -> None:
        self.number += 1
        run_until_idle(self.system, message(self.number, prompt, max_tokens=1, **fields))

    def cached(self, prompt: list[int]) -> int:
        """Tokens of it that are in the cache; looking changes nothing."""
        return self.system.kv.cache.match_len(pack_ids(prompt), len(prompt), b"")

    def press(self) -> None:
        """A stranger who needs ten pages where six are free: four have to go."""
        self.ask([50 + self.number] * 39)


@pytest.mark.parametrize(
    ("policy", "gone"),
    [("lru", B), ("mru", C), ("fifo", A), ("filo", C), ("lfu", C), ("slru", C), ("priority", A)],
)
def test_a_known_order_of_use_evicts_a_known_prompt(policy: str, gone: list[int]) -> None:
    with running(eviction=policy, **POOL) as system:
        traffic = Traffic(system)
        traffic.ask(A, priority=-1)
        traffic.ask(B, priority=1)
        traffic.ask(B, priority=1)
        traffic.ask(A, priority=-1)
        traffic.ask(C, priority=2)
        traffic.press()
        kept = {prompt[0]: traffic.cached(prompt) for prompt in (A, B, C)}
        assert kept == {prompt[0]: 0 if prompt == gone else 16 for prompt in (A, B, C)}
        assert system.kv.counts.num_evicted == 4


@pytest.mark.parametrize("policy", ["lru", "mru", "fifo", "priority"])
def test_what_is_retained_at_a_lower_priority_goes_first_whatever_the_policy(policy: str) -> None:
    with running(eviction=policy, **POOL) as system:
        traffic = Traffic(system)
        traffic.ask(A, retention=Retention((RetainedRange(0, None, 90),)))
        traffic.ask(B, retention=Retention((RetainedRange(0, None, 10),)))
        traffic.ask(C)
        traffic.press()
        assert [traffic.cached(prompt) for prompt in (A, B, C)] == [16, 0, 16]


def test_a_range_protects_its_tokens_and_no_others() -> None:
    with running(**POOL) as system:
        traffic = Traffic(system)
        traffic.ask(A, retention=Retention((RetainedRange(0, 8, 100),)))
        for _ in range(6):
            traffic.press()
        assert traffic.cached(A) == 8, "the first eight are kept, the rest has gone"
        assert system.kv.flush() > 0
        assert traffic.cached(A) == 0, "a flush spares nothing"


def test_retention_ends_its_duration_after_the_last_use() -> None:
    with running(**POOL) as system:
        traffic = Traffic(system)
        traffic.ask(A, retention=Retention((RetainedRange(0, None, 90, 500),)))
        traffic.ask(B)
        traffic.ask(C)
        traffic.press()
        assert [traffic.cached(prompt) for prompt in (A, B, C)] == [16, 0, 16]
        system.now += 0.4
        traffic.ask(A)  # used again: the time counts anew
        system.now += 0.4
        traffic.ask(C)
        traffic.ask(B)
        assert traffic.cached(A) == 16
        system.now += 0.5
        traffic.press()
        traffic.press()
        assert traffic.cached(A) == 0


def test_decode_retention_keeps_the_answer_and_not_the_prompt() -> None:
    answer = Retention(decode_priority=90)
    with running(**POOL) as system:
        traffic = Traffic(system)
        run_until_idle(system, message(900, A, max_tokens=9, retention=answer))
        leaf_pages = system.kv.cache.num_pages
        assert leaf_pages == 6, "four of the prompt, two full ones of the output"
        traffic.ask(B)
        traffic.press()
        traffic.press()
        assert traffic.cached(B) == 0
        assert system.kv.cache.match_len(system_tokens(system), 24, b"") == 24


def system_tokens(system: System) -> bytes:
    """Prompt and answer of the first request."""
    return pack_ids(A + next(iter(system.detokenizer.tokens.values())))


def test_the_last_request_that_says_something_decides() -> None:
    with running(**POOL) as system:
        traffic = Traffic(system)
        traffic.ask(A, retention=Retention((RetainedRange(0, None, 90),)))
        traffic.ask(A)
        traffic.ask(B)
        traffic.ask(C)
        traffic.press()
        assert traffic.cached(A) == 16, "who says nothing changes nothing"
        traffic.ask(A, retention=Retention((RetainedRange(0, None, 0),)))
        traffic.press()
        assert traffic.cached(A) == 0


def test_the_second_turn_finds_prompt_and_answer_of_the_first() -> None:
    with running(**POOL) as system:
        run_until_idle(system, message(900, A, max_tokens=11))
        (answer,) = system.detokenizer.tokens.values()
        run_until_idle(system, message(901, A + answer + [7, 7, 7]))
        second = list(system.detokenizer.closed.values())[1]
        assert second.cached_tokens == (16 + 11 - 1) // 4 * 4


def test_ranges_become_pages_by_their_first_token() -> None:
    retention = Retention((RetainedRange(3, 9, 50), RetainedRange(9, None, 60, 1500)), 70)
    assert [tuple(span) for span in retained_pages(retention, 18, 4)] == [
        (1, 3, 50, 0.0),
        (3, 5, 60, 1.5),
        (5, 1 << 29, 70, 0.0),
    ]


def test_without_a_cache_retention_is_refused_by_name() -> None:
    with running(cache="none", **POOL) as system:
        run_until_idle(system, message(1, A, retention=Retention()))
        (closed,) = system.detokenizer.closed.values()
        assert closed.error is not None
        assert (closed.reason, closed.error.param) == ("error", "kv_cache_retention_config")


class NoRank:
    def rank(self, run: Run) -> str:
        return "last"


class Newest:
    def rank(self, run: Run) -> int:
        if run.num_hits:
            raise ValueError("hits are not liked")
        return -run.created


def test_a_policy_of_ones_own_is_tried_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="known: fifo, filo, lfu, lru, mru, priority, slru"):
        make_eviction_policy("lifo")
    with pytest.raises(ConfigError, match=r"radix_eviction_policy.*rank must be a number, got 'last'"):
        make_eviction_policy(f"{__name__}:NoRank")


def test_a_policy_of_ones_own_that_fails_costs_a_place_in_line_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(eviction=f"{__name__}:Newest", **POOL) as system:
        traffic = Traffic(system)
        for prompt in (A, B, B, C):
            traffic.ask(prompt)
        traffic.press()
        assert [traffic.cached(prompt) for prompt in (A, B, C)] == [16, 0, 16]
        traffic.ask(A)
        traffic.press()
        assert len(caplog.records) == 1
