"""The radix hit rate on prompts that share prefixes is what arithmetic says."""

from __future__ import annotations

import random

import pytest

from runtime.wire.messages import ControlRequest
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import System

NUM_GROUPS, PROMPTS_PER_GROUP = 8, 12
NUM_SYSTEM, NUM_QUESTION = 61, 19


def generated_shared_prefix(rng: random.Random) -> list[list[int]]:
    """Draw prompts as load generators do: each group has a system prompt, each prompt its own question; in
    random order.
    """
    prompts = []
    for group in range(NUM_GROUPS):
        system_prompt = [group] + [rng.randrange(50) for _ in range(NUM_SYSTEM - 1)]
        for number in range(PROMPTS_PER_GROUP):
            question = [number] + [rng.randrange(50) for _ in range(NUM_QUESTION - 1)]
            prompts.append(system_prompt + question)
    rng.shuffle(prompts)
    return prompts


def serve(system: System, prompts: list[list[int]], at_once: int) -> tuple[int, int]:
    """Prompt tokens that were found, and all of them."""
    for start in range(0, len(prompts), at_once):
        wave = prompts[start : start + at_once]
        run_until_idle(
            system, *(message(start + i, prompt, max_tokens=3) for i, prompt in enumerate(wave, 1))
        )
    closed = system.detokenizer.closed.values()
    return sum(each.cached_tokens for each in closed), sum(len(prompt) for prompt in prompts)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("at_once", [1, 7, NUM_GROUPS * PROMPTS_PER_GROUP])
def test_the_first_of_each_group_computes_the_prefix_and_the_others_find_it(
    page_size: int, at_once: int
) -> None:
    """However many come at once: who would compute the same waits a step. Questions share nothing, being
    numbered at their first token.
    """
    changes = {"max_rows": 8, "num_pages": 16_000 // page_size, "budget": 64, "depth": 2}
    with running(page_size=page_size, **changes) as system:
        num_cached, num_tokens = serve(system, generated_shared_prefix(random.Random(3)), at_once)
        whole_pages = NUM_SYSTEM // page_size * page_size
        assert num_cached == NUM_GROUPS * (PROMPTS_PER_GROUP - 1) * whole_pages
        theory = (PROMPTS_PER_GROUP - 1) / PROMPTS_PER_GROUP * whole_pages / (NUM_SYSTEM + NUM_QUESTION)
        assert num_cached / num_tokens == pytest.approx(theory)
        num_reused = system.kv.counts.num_reused
        assert num_reused == num_cached // page_size
        assert system.kv.counts.hit_rate == num_reused / (num_reused + system.kv.counts.num_missed)


def test_with_a_pool_for_some_of_the_groups_the_rate_is_that_of_their_order() -> None:
    """Groups come one after the other; the pool holds two of them. A policy that evicted what is in use again
    would lose the prefix within its group.
    """
    prompts = sorted(generated_shared_prefix(random.Random(3)), key=lambda prompt: prompt[0])
    with running(page_size=4, max_rows=2, num_pages=100, budget=64) as system:
        num_cached, _ = serve(system, prompts, 2)
        assert num_cached == NUM_GROUPS * (PROMPTS_PER_GROUP - 1) * 60
        assert system.kv.counts.num_evicted > 0


def test_a_flush_while_requests_run_frees_what_they_do_not_use_and_loses_nothing() -> None:
    with running(page_size=4, max_rows=4, num_pages=120, budget=16, depth=2) as system:
        run_until_idle(system, message(900, [9] * 40))
        for number in range(1, 13):
            assert system.inbox.send(message(number, [number] * 30, max_tokens=20))
        for step in range(400):
            if step % 5 == 2:
                assert system.inbox.send(ControlRequest(1, step, "flush_cache"))
            system.step()  # every step checks that no page is lost and none has two owners
            if step == 2:
                assert system.kv.rows.num_running
                assert system.kv.counts.num_flushed == 10, "the prompt of nobody who runs"
            if step > 2 and system.scheduler.is_idle:
                break
        outputs = {len(tokens) for tokens in system.detokenizer.tokens.values()}
        assert outputs == {4, 20}
        assert len(system.detokenizer.closed) == 13
        system.kv.flush()
        assert system.kv.pages.num_free == system.kv.pages.num_pages
