"""Logprobs and raw logits of prompts and outputs, from plans by hand, against transformers' full forward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from model_worker.device import make_device
from model_worker.load_worker import load_worker
from model_worker.models.transformer import CausalLM
from model_worker.runner import prompt_positions, step_output
from model_worker.worker import ModelWorker
from runtime.base.errors import ExecutorError
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.wire.format import FloatArray, IntArray, pack_ids, unpack_floats, unpack_ids
from runtime.wire.plan import ChunkLogprobs, SampleMasks, StepResult
from runtime.wire.transport import Frame
from tests.harness.models.native import needs_compiler
from tests.harness.models.plans import (
    FEEDBACK,
    GREEDY,
    PROMPTS,
    VOCAB,
    PlanWriter,
    Wanted,
    make_worker,
    pages_of,
    tokens_of,
)

TOLERANCE = 1e-4
ROW_BYTES = 4 * VOCAB


@torch.inference_mode()
def logits_of(reference: LlamaForCausalLM, ids: Sequence[int]) -> Tensor:
    """[len(ids), V]"""
    logits: Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


def unpack(entry: ChunkLogprobs) -> tuple[FloatArray, IntArray, FloatArray]:
    chosen = unpack_floats(entry.logprobs)
    shape = (len(chosen), -1)
    return chosen, unpack_ids(entry.top_ids).reshape(shape), unpack_floats(entry.top_logprobs).reshape(shape)


def check_logprobs(
    parts: Sequence[tuple[FloatArray, IntArray, FloatArray]], logits: Tensor, targets: Sequence[int], k: int
) -> None:
    chosen, top_ids, top = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    expected = logits.log_softmax(-1)
    best = expected.topk(k)
    np.testing.assert_allclose(chosen, expected[range(len(targets)), targets], atol=TOLERANCE)
    np.testing.assert_array_equal(top_ids, best.indices)
    np.testing.assert_allclose(top, best.values, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_prompt_logprobs_equal_a_full_forward_in_chunks_beside_decodes(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM, chunk: int
) -> None:
    """Row 3 decodes meanwhile, row 1 asks nothing, row 0 has two positions already; each wants another k."""
    worker, plans = tiny_worker
    plans.open_row(3, PROMPTS[1], pages_of(3), num_logprobs=1, **GREEDY)
    worker.launch(plans.plan(chunks=[(3, PROMPTS[1], True)])).result()
    asked = {0: (2, 3), 2: (0, 0)}  # row: (first position, k)
    parts: dict[int, list[tuple[FloatArray, IntArray, FloatArray]]] = {0: [], 2: []}
    for row, prompt in enumerate(PROMPTS):
        plans.open_row(row, prompt, pages_of(row), **GREEDY)
    while any(plans.kv_len[row] < len(prompt) for row, prompt in enumerate(PROMPTS)):
        chunks, wanted = [], {}
        for row, prompt in enumerate(PROMPTS):
            done = plans.kv_len[row]
            ids = prompt[done : done + chunk]
            if ids:
                chunks.append((row, ids, done + len(ids) == len(prompt)))
            if row in asked and done + len(ids) > max(done, asked[row][0]):
                wanted[row] = Wanted(prompt, max(0, asked[row][0] - done), asked[row][1])
        result = worker.launch(plans.plan([(3, FEEDBACK)], chunks, wanted=wanted)).result()
        rows = [3] + [row for row, _, _ in chunks]
        assert [rows[entry.index] for entry in result.prompts] == list(wanted)
        for entry in result.prompts:
            parts[rows[entry.index]].append(unpack(entry))
    for row, (first, k) in asked.items():
        prompt = PROMPTS[row]
        check_logprobs(parts[row], logits_of(tiny_reference, prompt)[first:], [*prompt[first + 1 :], 0], k)


def context_logits(result: StepResult, frames: Sequence[Frame], index: int) -> tuple[int, FloatArray]:
    """(position of the first, all rows of logits) of one row of the plan."""
    mine = [
        (tensor, frame)
        for tensor, frame in zip(result.tensors, frames, strict=True)
        if tensor.index == index and tensor.name == "context_logits"
    ]
    arrays = [np.frombuffer(frame, np.float32).reshape(tensor.shape) for tensor, frame in mine]
    for (before, _), (after, _) in pairwise(mine):
        assert after.start == before.start + before.shape[0]
    return mine[0][0].start, np.concatenate(arrays)


@pytest.mark.parametrize("rows_a_block", [1, 4, 1000])
@pytest.mark.parametrize("rows_a_frame", [1, 3, 1000])
def test_context_logits_equal_a_full_forward_whatever_the_size_of_blocks_and_frames(
    tiny_checkpoint: tuple[Path, LlamaForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
    rows_a_block: int,
    rows_a_frame: int,
) -> None:
    monkeypatch.setattr(prompt_positions, "BLOCK_BYTES", rows_a_block * ROW_BYTES + 3)
    monkeypatch.setattr(step_output, "MAX_FRAME_BYTES", rows_a_frame * ROW_BYTES + 3)
    sizes: list[int] = []
    compute = CausalLM.compute_logits

    def counted(model: CausalLM, hidden: Tensor) -> Tensor:
        sizes.append(hidden.shape[0])
        return compute(model, hidden)

    monkeypatch.setattr(CausalLM, "compute_logits", counted)
    worker, plans = make_worker(tiny_checkpoint[0], 4), PlanWriter(4)
    for row, prompt in enumerate(PROMPTS):
        plans.open_row(row, prompt, pages_of(row), **GREEDY)
    worker.launch(plans.plan(chunks=[(0, PROMPTS[0][:6], False)])).result()
    step = worker.launch(
        plans.plan(
            chunks=[(0, PROMPTS[0][6:], True), (1, PROMPTS[1], True), (2, PROMPTS[2], True)],
            wanted={
                0: Wanted(PROMPTS[0], 2, 2, returns_logits=True),
                1: Wanted(PROMPTS[1], 0, 1),
                2: Wanted(PROMPTS[2], 0, returns_logits=True),
            },
        )
    )
    result = step.result()
    assert max(sizes) <= max(rows_a_block, 3), "the head ran over more than a block"
    assert [entry.index for entry in result.prompts] == [0, 1]
    assert all(memoryview(frame).nbytes <= rows_a_frame * ROW_BYTES for frame in step.frames)
    for row, start in ((0, 8), (2, 0)):
        expected = logits_of(tiny_checkpoint[1], PROMPTS[row])
        got_start, got = context_logits(result, step.frames, row)
        assert got_start == start
        np.testing.assert_allclose(got, expected[start:], atol=TOLERANCE)
        assert got[-1].argmax() == tokens_of(result)[row]
    logits = logits_of(tiny_checkpoint[1], PROMPTS[0])[8:]
    check_logprobs([unpack(result.prompts[0])], logits, [*PROMPTS[0][9:], 0], 2)
    worker.close()


def test_the_head_runs_on_what_is_sampled_alone_when_no_plan_asks_for_more(
    tiny_worker: tuple[ModelWorker, PlanWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, plans = tiny_worker
    sizes: list[int] = []
    compute = CausalLM.compute_logits

    def counted(model: CausalLM, hidden: Tensor) -> Tensor:
        sizes.append(hidden.shape[0])
        return compute(model, hidden)

    monkeypatch.setattr(CausalLM, "compute_logits", counted)
    plans.open_row(0, PROMPTS[0], pages_of(0), **GREEDY)
    plans.open_row(1, PROMPTS[1], pages_of(1), **GREEDY)
    step = worker.launch(plans.plan(chunks=[(0, PROMPTS[0][:9], False), (1, PROMPTS[1], True)]))
    assert step.result().prompts == ()
    assert (step.frames, sizes) == ((), [1])


def test_generation_logits_are_raw_and_of_the_rows_that_asked(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    """Decodes beside chunks, two steps in flight: each frame says whose it is and which position's."""
    worker, plans = tiny_worker
    bias = {"bias_ids": pack_ids([40]), "bias_values": np.array([100.0], np.float32).tobytes()}
    plans.open_row(2, PROMPTS[2], pages_of(2), returns_logits=True, **bias, **GREEDY)
    plans.open_row(1, PROMPTS[1], pages_of(1), **GREEDY)
    plans.open_row(0, PROMPTS[0], pages_of(0), returns_logits=True, **GREEDY)
    steps = [
        worker.launch(
            plans.plan(
                chunks=[(0, PROMPTS[0][:5], False), (1, PROMPTS[1], True), (2, PROMPTS[2], True)],
                wanted={2: Wanted(PROMPTS[2], 9, 0, returns_logits=True)},
            )
        ),
        worker.launch(
            plans.plan([(2, FEEDBACK), (1, FEEDBACK)], [(0, PROMPTS[0][5:], True)]),
        ),
    ]
    results = [step.result() for step in steps]
    described = [(t.index, t.name, t.start, t.shape) for result in results for t in result.tensors]
    assert described == [
        (2, "context_logits", 9, (2, VOCAB)),
        (2, "generation_logits", 11, (1, VOCAB)),
        (0, "generation_logits", 12, (1, VOCAB)),
        (2, "generation_logits", 20, (1, VOCAB)),
    ]
    frames = [np.frombuffer(frame, np.float32) for step in steps for frame in step.frames]
    forced = logits_of(tiny_reference, [*PROMPTS[2], 40])
    expected = [forced[9:11].flatten(), forced[10], forced[11], logits_of(tiny_reference, PROMPTS[0])[-1]]
    for got, logits in zip(frames, expected, strict=True):
        np.testing.assert_allclose(got, logits, atol=TOLERANCE)
    assert tokens_of(results[1])[0] == 40
    assert tokens_of(results[1])[2] == frames[3].argmax()


def test_a_deferred_step_has_prompt_positions_and_raw_logits_too(
    tiny_worker: tuple[ModelWorker, PlanWriter], tiny_reference: LlamaForCausalLM
) -> None:
    worker, plans = tiny_worker
    prompt = PROMPTS[2]
    plans.open_row(0, prompt, pages_of(0), returns_logits=True, **GREEDY)
    wanted = {0: Wanted(prompt, 0, 1, returns_logits=True)}
    step = worker.launch(plans.plan(chunks=[(0, prompt, True)], wanted=wanted, defer_sampling=True))
    worker.sample(step, SampleMasks(step=1, masks=((0, (1 << 11).to_bytes(4, "little")),)))
    result = step.result()
    logits = logits_of(tiny_reference, prompt)
    assert tokens_of(result) == [11]
    check_logprobs([unpack(result.prompts[0])], logits, [*prompt[1:], 0], 1)
    np.testing.assert_allclose(context_logits(result, step.frames, 0)[1], logits, atol=TOLERANCE)
    np.testing.assert_allclose(np.frombuffer(step.frames[-1], np.float32), logits[-1], atol=TOLERANCE)


def test_positions_that_do_not_end_with_their_chunk_are_a_failed_step(
    tiny_worker: tuple[ModelWorker, PlanWriter],
) -> None:
    worker, plans = tiny_worker
    plans.open_row(0, PROMPTS[0], pages_of(0), **GREEDY)
    wanted = {0: Wanted(PROMPTS[0][:4], 0, 1)}
    step = worker.launch(plans.plan(chunks=[(0, PROMPTS[0], True)], wanted=wanted))
    with pytest.raises(ExecutorError, match="prompt_positions end where their chunk does"):
        step.result()


@needs_compiler
def test_packed_bfloat16_heads_give_a_position_the_same_bits_in_a_block_and_sampled_alone() -> None:
    config = RuntimeConfig(
        model=str(DEMO_MODEL),
        dtype="bfloat16",
        device="cpu",
        attention_backend="cpu_native",
        context_length=64,
        max_running_requests=2,
        max_total_tokens=256,
        page_size=16,
    )
    worker, plans = load_worker(config, make_device("cpu", threaded=False), lambda: None), PlanWriter(16)
    prompt = list(range(100, 140))
    plans.open_row(0, prompt, [3, 5, 7], returns_logits=True, **GREEDY)
    worker.launch(plans.plan(chunks=[(0, prompt[:7], False)])).result()
    wanted = {0: Wanted(prompt, 1, returns_logits=True)}
    step = worker.launch(plans.plan(chunks=[(0, prompt[7:], True)], wanted=wanted))
    start, logits = context_logits(step.result(), step.frames, 0)
    assert (start, len(logits)) == (8, 32)
    np.testing.assert_array_equal(logits[-1], np.frombuffer(step.frames[-1], np.float32))
    worker.close()
