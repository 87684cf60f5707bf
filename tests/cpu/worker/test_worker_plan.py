"""ModelWorker: plans written by hand against a plain full forward of the same checkpoint in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import LlamaForCausalLM

from model_worker.runner.device_memory import MAX_CPU_KV_BYTES, size_kv_pool
from model_worker.worker import ModelWorker
from runtime.base.errors import ConfigError, ExecutorError
from runtime.wire.format import pack_ids, unpack_floats, unpack_ids
from runtime.wire.plan import SampleMasks
from tests.harness.models.plans import (
    FEEDBACK,
    GREEDY,
    PROMPTS,
    VOCAB,
    PlanWriter,
    greedy_reference,
    make_worker,
    pages_of,
    tokens_of,
)


def open_rows(plans: PlanWriter, **sampling: object) -> None:
    for row, prompt in enumerate(PROMPTS):
        plans.open_row(row, prompt, pages_of(row), **{"seed": row, **sampling})


def generate(
    worker: ModelWorker,
    plans: PlanWriter,
    num_tokens: int,
    chunk: int,
    *,
    in_flight: int = 2,
    feed_back: bool = True,
) -> list[list[int]]:
    """Prompts in chunks, decodes beside them in one step.

    feed_back: the device takes each sampled token itself; else the host sends it, one step in flight.
    """
    out: list[list[int]] = [[] for _ in PROMPTS]
    waiting = []
    while any(len(tokens) < num_tokens for tokens in out):
        decodes, chunks, samplers = [], [], []
        for row, prompt in enumerate(PROMPTS):
            done = plans.kv_len[row]
            if done < len(prompt):
                last = done + chunk >= len(prompt)
                chunks.append((row, prompt[done : done + chunk], last))
            elif done < len(prompt) + num_tokens - 1:
                decodes.append((row, FEEDBACK if feed_back else out[row][-1]))
        if decodes or chunks:
            samplers = [row for row, _ in decodes] + [row for row, _, last in chunks if last]
            waiting.append((samplers, worker.launch(plans.plan(decodes, chunks))))
        if len(waiting) >= in_flight or not (decodes or chunks):
            rows, step = waiting.pop(0)
            for row, token in zip(rows, tokens_of(step.result()), strict=True):
                out[row].append(token)
    return out


@pytest.mark.parametrize("chunk", [3, 64])
def test_greedy_tokens_equal_a_plain_full_forward(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM, chunk: int
) -> None:
    """Chunks and decodes in one forward, scattered pages, each input token known to the device alone."""
    worker, plans = tiny_worker
    open_rows(plans, **GREEDY)
    got = generate(worker, plans, 9, chunk)
    assert got == [greedy_reference(tiny_reference, prompt, 9) for prompt in PROMPTS]


def test_seeded_draws_are_the_same_for_any_chunk_page_size_and_overlap(
    tiny_checkpoint: tuple[Path, LlamaForCausalLM],
) -> None:
    results = []
    for page_size, threaded, chunk, in_flight, feed_back in [
        (1, False, 64, 1, False),
        (16, True, 2, 2, True),
        (4, True, 5, 3, True),
    ]:
        worker = make_worker(tiny_checkpoint[0], page_size, threaded=threaded)
        plans = PlanWriter(page_size)
        open_rows(plans, temperature=0.8, top_p=0.95)
        results.append(generate(worker, plans, 8, chunk, in_flight=in_flight, feed_back=feed_back))
        worker.close()
    assert results[0] == results[1] == results[2]
    assert len({tuple(tokens) for tokens in results[0]}) == len(PROMPTS)


def test_a_page_and_a_row_may_change_hands_with_a_step_in_flight(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    worker, plans = tiny_worker
    old, new = PROMPTS[0], PROMPTS[2]
    plans.open_row(0, old, pages_of(0), **GREEDY)
    first = worker.launch(plans.plan(chunks=[(0, old, True)]))
    second = worker.launch(plans.plan(decodes=[(0, FEEDBACK)]))
    # The same row and the same pages, in another order, before anybody has seen a result.
    plans.open_row(0, new, pages_of(0)[::-1], **GREEDY)
    third = worker.launch(plans.plan(chunks=[(0, new, True)]))
    assert tokens_of(first.result()) + tokens_of(second.result()) == greedy_reference(tiny_reference, old, 2)
    assert tokens_of(third.result()) == greedy_reference(tiny_reference, new, 1)


def test_copied_pages_hold_what_the_source_held(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    """A fork: the second row's pages are copies, then both rows go on by themselves."""
    worker, plans = tiny_worker
    prompt = PROMPTS[0][:18]
    plans.open_row(0, prompt, pages_of(0), **GREEDY)
    worker.launch(plans.plan(chunks=[(0, prompt, True)])).result()
    plans.open_row(1, prompt, pages_of(1), **GREEDY)
    plans.kv_len[1] = len(prompt)
    num_pages = -(-len(prompt) // plans.page_size)
    for source, target in zip(pages_of(0)[:num_pages], pages_of(1)[:num_pages], strict=True):
        plans.copy_page(source, target)
    own = [40, 41]
    step = worker.launch(plans.plan(decodes=[(0, own[0]), (1, own[1])]))
    expected = [greedy_reference(tiny_reference, [*prompt, token], 1)[0] for token in own]
    assert tokens_of(step.result()) == expected


def test_a_deferred_step_samples_under_its_masks_and_feeds_the_result_back(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    worker, plans = tiny_worker
    first, second = PROMPTS[1], PROMPTS[2]
    plans.open_row(0, first, pages_of(0), **GREEDY)
    plans.open_row(1, second, pages_of(1), **GREEDY)
    step = worker.launch(plans.plan(chunks=[(0, first, True), (1, second, True)], defer_sampling=True))
    assert step.awaits_masks
    assert not step.done()
    with pytest.raises(ExecutorError, match="masks"):
        step.result()
    allowed = 70
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    words[allowed // 32] = 1 << (allowed % 32)
    worker.sample(step, SampleMasks(step=1, masks=((0, words.tobytes()),)))
    assert tokens_of(step.result()) == [allowed, *greedy_reference(tiny_reference, second, 1)]
    follow = worker.launch(plans.plan(decodes=[(0, FEEDBACK)]))
    assert tokens_of(follow.result()) == greedy_reference(tiny_reference, [*first, allowed], 1)


def test_result_counts_what_each_row_of_the_rest_sampled_and_carries_logprobs(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    worker, plans = tiny_worker
    plans.open_row(0, PROMPTS[0], pages_of(0), **GREEDY)
    plans.open_row(1, PROMPTS[1], pages_of(1), num_logprobs=2, **GREEDY)
    result = worker.launch(plans.plan(chunks=[(0, PROMPTS[0][:5], False), (1, PROMPTS[1], True)])).result()
    assert unpack_ids(result.counts).tolist() == [0, 1]
    with torch.inference_mode():
        expected = tiny_reference(torch.tensor([PROMPTS[1]])).logits[0, -1].log_softmax(-1)
    top = expected.topk(2)
    assert tokens_of(result) == [int(top.indices[0])]
    assert result.num_top == 2
    assert unpack_ids(result.top_ids).tolist() == top.indices.tolist()
    np.testing.assert_allclose(unpack_floats(result.logprobs), [float(top.values[0])], atol=1e-5)
    np.testing.assert_allclose(unpack_floats(result.top_logprobs), top.values.numpy(), atol=1e-5)


def test_a_step_without_samples_gives_an_empty_result(tiny_worker: tuple[ModelWorker, PlanWriter]) -> None:
    worker, plans = tiny_worker
    plans.open_row(0, PROMPTS[0], pages_of(0), **GREEDY)
    result = worker.launch(plans.plan(chunks=[(0, PROMPTS[0][:5], False)])).result()
    assert result.tokens == b""
    assert unpack_ids(result.counts).tolist() == [0]


@pytest.mark.parametrize("deferred", [False, True])
def test_a_plan_that_fails_raises_from_result_and_never_hangs(
    tiny_worker: tuple[ModelWorker, PlanWriter], deferred: bool
) -> None:
    worker, plans = tiny_worker
    plans.open_row(0, PROMPTS[1], pages_of(0), **GREEDY)
    bad = structs.replace(
        plans.plan(chunks=[(0, PROMPTS[1], True)], defer_sampling=deferred), table_pages=pack_ids([])
    )
    step = worker.launch(bad)
    if deferred:
        worker.sample(step, SampleMasks(step=bad.step, masks=()))
    with pytest.raises(ExecutorError, match="table_pages does not match table_spans"):
        step.result()


def test_nothing_is_launched_after_a_step_that_failed(tiny_checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    """Its collectives would meet those that the other ranks' devices still have of the failed one."""
    worker, plans = make_worker(tiny_checkpoint[0], 4, threaded=False), PlanWriter(4)
    plans.open_row(0, PROMPTS[1], pages_of(0), **GREEDY)
    prompt, decode = plans.plan(chunks=[(0, PROMPTS[1], True)]), plans.plan(decodes=[(0, 5)])
    worker.launch(structs.replace(prompt, table_pages=pack_ids([])))
    with pytest.raises(ExecutorError, match=r"step 1 failed: .*table_pages"):
        worker.launch(decode)
    worker.close()


def test_warm_up_leaves_no_trace(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    worker, plans = tiny_worker
    worker.warm_up()
    open_rows(plans, **GREEDY)
    assert generate(worker, plans, 4, 7) == [
        greedy_reference(tiny_reference, prompt, 4) for prompt in PROMPTS
    ]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, 499),
        ({"max_total_tokens": 1600}, 100),
        ({"max_total_tokens": 1000}, 63),
        ({"host_bytes": 16_000_000}, 124),
        ({"host_bytes": 16_000_000, "max_total_tokens": 1 << 29}, 499),
        ({"max_total_tokens": 1 << 29}, 499),
        ({"free_bytes": 1 << 40, "host_bytes": 1 << 40}, MAX_CPU_KV_BYTES // (16 * 1000) - 1),
        ({"free_bytes": 1 << 40}, (1 << 39) // (16 * 1000) - 1),
    ],
)
def test_pool_takes_the_smaller_of_memory_and_the_token_cap(asked: dict[str, object], expected: int) -> None:
    settings = {
        "free_bytes": 16_000_000,
        "fraction": 0.5,
        "bytes_per_token": 1000,
        "page_size": 16,
        "max_total_tokens": 0,
    }
    assert size_kv_pool(**{**settings, **asked}) == expected  # type: ignore[arg-type]


def test_a_pool_without_room_for_two_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for a KV cache"):
        size_kv_pool(
            free_bytes=10_000,
            fraction=0.9,
            bytes_per_token=1000,
            page_size=16,
            max_total_tokens=0,
        )
