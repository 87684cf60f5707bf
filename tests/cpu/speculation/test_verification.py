"""Verification of guesses: tokens, logprobs and logits are those of decoding one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from transformers import LlamaForCausalLM

from model_worker.worker import ModelWorker
from runtime.base.errors import ExecutorError
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.plan import SampleMasks
from tests.harness.models.plans import (
    FEEDBACK,
    GREEDY,
    PROMPTS,
    PlanWriter,
    Wanted,
    greedy_reference,
    make_worker,
    pages_of,
    tokens_of,
)
from tests.harness.models.sampler_driver import bitmask
from tests.harness.models.speculation import (
    SAMPLINGS,
    Generation,
    Output,
    Proposer,
    assert_same,
    from_outputs,
    launched_on,
    no_guesses,
)

NUM_TOKENS = 11
NUM_ROWS = 4
ROWS = [PROMPTS[row % 3][: 12 - row] for row in range(NUM_ROWS)]
REPORTS: dict[str, Any] = {"num_logprobs": 3, "returns_logits": True}


def _generate(
    checkpoint: Path,
    samplings: Sequence[dict[str, Any]],
    propose: Proposer = no_guesses,
    *,
    page_size: int = 4,
    chunk: int = 64,
    num_tokens: int = NUM_TOKENS,
) -> list[Output]:
    run = launched_on(make_worker(checkpoint, page_size))
    generation = Generation(run, page_size, ROWS[: len(samplings)], samplings, pages_of)
    return generation.generate(num_tokens, propose, chunk=chunk)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_guesses_change_nothing(tiny_checkpoint: tuple[Path, LlamaForCausalLM], name: str) -> None:
    path = tiny_checkpoint[0]
    samplings = [{**SAMPLINGS[name], **REPORTS}] * 3
    expected = _generate(path, samplings)
    perfect = _generate(path, samplings, from_outputs(expected, 4, right=1.0))
    assert_same(perfect, expected)
    # The prompt's step brings five tokens, the next ones five and one.
    assert [out.num_steps for out in perfect] == [3] * 3
    garbage = _generate(path, samplings, from_outputs(expected, 4, right=0.0))
    assert_same(garbage, expected)
    assert [out.num_steps for out in garbage] == [NUM_TOKENS] * 3
    partly = from_outputs(expected, 0, right=0.7, always=False)
    assert_same(_generate(path, samplings, partly, page_size=1, chunk=5), expected)
    assert len({tuple(out.tokens) for out in expected}) == 3


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 3), (16, 64)])
def test_rows_of_all_kinds_in_one_batch(
    tiny_checkpoint: tuple[Path, LlamaForCausalLM], page_size: int, chunk: int
) -> None:
    """Rows with reports beside rows without, rows that look back beside plain ones, some without guesses."""
    path = tiny_checkpoint[0]
    kinds = list(SAMPLINGS.values())
    reports: list[dict[str, Any]] = [{}, {"num_logprobs": 1}, {"returns_logits": True}, REPORTS]
    for first in range(0, len(kinds), NUM_ROWS):
        samplings = [
            {**sampling, **reports[row]} for row, sampling in enumerate(kinds[first : first + NUM_ROWS])
        ]
        expected = _generate(path, samplings)
        known = from_outputs(expected, 0, right=0.8, always=False)

        def some(row: int, *rest: Any, of: Proposer = known) -> Sequence[int]:
            return of(row, *rest) if row != 1 else ()

        for propose in (known, some):
            assert_same(_generate(path, samplings, propose, page_size=page_size, chunk=chunk), expected)


def test_a_result_counts_accepted_guesses_and_the_token_behind_them(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    """The last token is the device's own to go on with, whether it was right behind a guess or not."""
    worker, plans = tiny_worker
    prompt, other = PROMPTS[1], PROMPTS[2]
    a, b, c, d, e, f, g = greedy_reference(tiny_reference, prompt, 7)
    wrong = (c + 1) % 97
    plans.open_row(0, prompt, pages_of(0), **GREEDY)
    plans.open_row(1, other, pages_of(1), **GREEDY)

    def run(ids: Sequence[int], num_drafts: int) -> list[int]:
        result = worker.launch(plans.plan(chunks=[(0, ids, True)], drafts={0: num_drafts})).result()
        tokens = tokens_of(result)
        assert unpack_ids(result.counts).tolist() == [len(tokens)]
        plans.accept(0, len(tokens))
        return tokens

    assert run([*prompt, a, b, wrong, d], 4) == [a, b, c]
    assert run([FEEDBACK, wrong], 1) == [d]
    assert run([FEEDBACK, e, f], 2) == [e, f, g]
    plan = plans.plan([(0, FEEDBACK)], [(1, [*other, 5, 6], False)], drafts={1: 0})
    result = worker.launch(plan).result()
    assert tokens_of(result) == greedy_reference(tiny_reference, prompt, 8)[7:]
    assert unpack_ids(result.counts).tolist() == [0]


def test_each_place_of_a_row_has_its_own_mask(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    """A guess that the mask before it forbids is rejected; behind the last mask nothing is forbidden."""
    worker, plans = tiny_worker
    prompt = PROMPTS[1]
    a, b, c, d = greedy_reference(tiny_reference, prompt, 4)
    everything = list(range(97))
    for number, (masks, expected) in enumerate(
        [
            ([everything], [a, b, c, d]),
            ([everything] * 4, [a, b, c, d]),
            ([[a], [b], [9]], [a, b, 9]),
            ([everything, [9]], [a, 9]),
            ([[9], [a]], [9]),
        ]
    ):
        plans.open_row(number, prompt, pages_of(number), **GREEDY)
        plan = plans.plan(chunks=[(number, [*prompt, a, b, c], True)], drafts={number: 3})
        plan = structs.replace(plan, defer_sampling=True)
        step = worker.launch(plan)
        packed = tuple((number, bitmask(allowed, 97)) for allowed in masks)
        worker.sample(step, SampleMasks(plan.step, packed))
        result = step.result()
        assert tokens_of(result) == expected
        assert unpack_ids(result.counts).tolist() == [len(expected)]


def test_prompt_positions_end_before_the_guesses(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    worker, plans = tiny_worker
    prompt = PROMPTS[0]
    guesses = greedy_reference(tiny_reference, prompt, 3)
    seen = []
    for row, drafts in ((0, 0), (1, 3)):
        plans.open_row(row, prompt, pages_of(row), **GREEDY)
        wanted = {row: Wanted(prompt, 2, 1, returns_logits=True)}
        ids = [*prompt, *guesses[:drafts]]
        step = worker.launch(plans.plan(chunks=[(row, ids, True)], wanted=wanted, drafts={row: drafts}))
        result = step.result()
        assert [(t.name, t.start, t.shape) for t in result.tensors] == [("context_logits", 2, (18, 97))]
        (entry,) = result.prompts
        seen.append((entry.top_ids, len(entry.logprobs)))
        assert tokens_of(result)[:1] == guesses[:1]
    assert seen[0] == seen[1]


def test_drafts_that_a_plan_cannot_have_are_refused(tiny_worker: tuple[ModelWorker, PlanWriter]) -> None:
    worker, plans = tiny_worker
    plans.open_row(0, PROMPTS[1], pages_of(0), **GREEDY)
    good = plans.plan(chunks=[(0, PROMPTS[1], True)], drafts={0: 1})
    for changes in ({"samples": pack_ids([0])}, {"drafts": pack_ids([4])}, {"drafts": pack_ids([-1])}):
        with pytest.raises(AssertionError, match="drafts of a row"):
            worker._runner.forward(structs.replace(good, **changes))
    with pytest.raises(AssertionError, match="a guess that the host does not know"):
        worker._runner.forward(structs.replace(good, input_ids=pack_ids([7, 7, 50, FEEDBACK])))
    with pytest.raises(ExecutorError, match="drafts of a row"):
        worker.launch(structs.replace(good, drafts=pack_ids([4]))).result()
