"""Logits processors in a sampler: where in its order, what fails, and what they may leave behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from model_worker.device.cpu import CpuDevice
from model_worker.sampling.processors.runner import ProcessorRunner
from model_worker.sampling.sampler import Sampler
from runtime.base.errors import InvalidRequest
from runtime.sampling.features import PROCESSED
from runtime.wire.format import pack_ids
from runtime.wire.plan import ProcessedRow, ProcessorCall, RowProcessing, check_calls
from tests.harness.models.native import native_kernels
from tests.harness.models.sampler_driver import (
    CPU,
    MAX_LEN,
    MAX_ROWS,
    VOCAB,
    NativeDevice,
    bitmask,
    random_logits,
    sample,
    setup,
)

PROMPT = [5, 6, 7, 8]


def sampler_of(device: CpuDevice = CPU, **processors: Callable[..., Any]) -> tuple[Sampler, ProcessorRunner]:
    runner = ProcessorRunner(processors, device)
    kernels = native_kernels() if isinstance(device, NativeDevice) else None
    sampler = Sampler(
        device, max_rows=MAX_ROWS, max_len=MAX_LEN, vocab_size=VOCAB, kernels=kernels, processors=runner
    )
    return sampler, runner


def open_row(sampler: Sampler, row: int, *names: str, search: int = 0, **fields: Any) -> None:
    """A greedy row that has these processors. search: number of the beam search whose it is."""
    fields = {"temperature": 0.0, "history_ids": pack_ids(PROMPT), **fields}
    made = setup(row, **fields).setup()
    if names:
        calls = tuple(ProcessorCall(name) for name in names)
        processing = RowProcessing(search or 100 + row, "", calls, search > 0)
        made = msgspec.structs.replace(
            made, features=made.features | PROCESSED, processing=processing, history_ids=pack_ids(PROMPT)
        )
    with torch.inference_mode():
        sampler.open_rows([made])


def expect(runner: ProcessorRunner, *rows: int) -> None:
    runner.expect([ProcessedRow(row, row, len(PROMPT), b"") for row in rows])


def only(*allowed: int) -> Callable[..., None]:
    def processor(request_id: int, logits: Tensor, *rest: Any) -> None:
        kept = logits[..., list(allowed)].clone()
        logits.fill_(-math.inf)
        logits[..., list(allowed)] = kept

    return processor


def test_they_come_before_penalties_and_masks_and_behind_what_is_reported() -> None:
    sampler, runner = sampler_of(few=only(3, 5, 9))
    logits = random_logits(1)
    logits[0, [3, 5, 9]] = torch.tensor([1.0, 3.0, 2.0])
    open_row(sampler, 0, "few", repetition_penalty=3.0, num_logprobs=1)
    expect(runner, 0)
    sampled = sample(sampler, logits, [0], [4])
    assert sampled.tokens.tolist() == [9]  # 5 stands in the prompt
    assert sampled.logprobs is not None
    expected = logits[0].log_softmax(-1)
    assert sampled.logprobs.chosen.item() == pytest.approx(expected[9].item(), abs=1e-5)
    expect(runner, 0)
    assert sample(sampler, logits, [0], [4], {0: bitmask([3, 4])}).tokens.tolist() == [3]


def test_what_is_reported_is_the_models_own_where_nothing_but_a_processor_changes_it() -> None:
    sampler, runner = sampler_of(few=only(3))
    logits = random_logits(2)
    for row in range(2):
        open_row(sampler, row, "few", num_logprobs=1)
    expect(runner, 0, 1)
    sampled = sample(sampler, logits, [0, 1], [4, 4])
    assert sampled.tokens.tolist() == [3, 3]
    assert sampled.logprobs is not None
    assert torch.allclose(sampled.logprobs.chosen, logits.log_softmax(1)[:, 3], atol=1e-5)
    assert sampled.logprobs.top_ids[:, 0].tolist() == logits.argmax(1).tolist()


def test_a_row_that_is_not_asked_for_is_left_as_it_is() -> None:
    """It has ended, and the step that overlaps its end is sampled with the others."""
    sampler, runner = sampler_of(few=only(3))
    logits = random_logits(3)
    for row in range(3):
        open_row(sampler, row, *(["few"] if row else []))
    expect(runner, 2)
    best = logits.argmax(-1).tolist()
    assert sample(sampler, logits, [2, 0, 1], [4, 4, 4]).tokens.tolist() == [3, best[1], best[2]]
    assert sample(sampler, logits, [2, 0, 1], [5, 5, 5]).tokens.tolist() == best


def test_rows_of_a_search_are_one_call_on_log_probabilities_with_the_tokens_of_each_beam() -> None:
    seen: list[tuple[Tensor, list[list[int]]]] = []

    def watch(request_id: int, logits: Tensor, token_ids: list[list[int]], *rest: Any) -> Tensor:
        seen.append((logits.clone(), token_ids))
        token_ids[0].clear()  # it is the processor's own
        changed = logits * 2
        changed[..., :3] = torch.tensor([math.nan, math.inf, -math.inf])
        return changed

    sampler, runner = sampler_of(watch=watch, few=only(3))
    for row in range(3):
        open_row(sampler, row, "watch", search=7)
    open_row(sampler, 3, "few")
    logits = random_logits(4)
    # Beam 1 stays in row 0, and beam 0 has forked from it to row 2.
    first = [ProcessedRow(0, 0, 4, pack_ids([9]), 1), ProcessedRow(2, 0, 4, pack_ids([10]), 0)]
    runner.expect([*first, ProcessedRow(3, 3, 4, b"")])
    sampled = sample(sampler, logits, [0, 1, 2, 3], [4] * 4)
    assert sampled.tokens.tolist()[:2] == logits[:2].argmax(1).tolist()
    assert sampled.tokens[3] == 3
    runner.expect([ProcessedRow(2, 2, 5, pack_ids([11]), 0), ProcessedRow(1, 2, 5, pack_ids([12]), 1)])
    sample(sampler, logits, [0, 1, 2, 3], [5] * 4)
    (called, tokens), (_, next_tokens) = seen
    assert tokens[1] == [*PROMPT, 9]
    assert next_tokens[1] == [*PROMPT, 10, 12]
    assert torch.allclose(called, logits[[2, 0]].log_softmax(1)[None])
    assert sampled.scores is not None
    assert sampled.scores_of.tolist() == [2, 0]
    assert sampled.scores[0, :3].tolist() == [-math.inf, pytest.approx(1e30), -math.inf]
    assert torch.equal(sampled.scores[:, 3:], called[0, :, 3:] * 2)


def test_a_row_that_fails_is_named_and_no_other_changes() -> None:
    def fails(request_id: int, logits: Tensor, *rest: Any) -> None:
        logits.fill_(math.nan)
        raise KeyError(request_id)

    sampler, runner = sampler_of(fails=fails, few=only(3), odd=lambda *_: torch.zeros(2))
    for row, name in enumerate(("few", "fails", "odd", "few")):
        open_row(sampler, row, name)
    expect(runner, 0, 1, 2, 3)
    sampled = sample(sampler, random_logits(4), [3, 1, 0, 2], [4] * 4)
    assert [(at, error.split(":")[0]) for at, error in sampled.errors] == [
        (1, "logits processor fails failed"),
        (3, "logits processor odd failed"),
    ]
    assert sampled.tokens[[0, 2]].tolist() == [3, 3]


@pytest.mark.parametrize("device", [CPU, NativeDevice(threaded=False)], ids=["torch", "native"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("left", [math.nan, -math.inf, math.inf])
def test_whatever_they_leave_an_id_of_the_vocabulary_is_drawn(
    device: CpuDevice, temperature: float, left: float
) -> None:
    sampler, runner = sampler_of(device, all=lambda _, logits, *rest: logits.fill_(left))
    open_row(sampler, 0, "all", temperature=temperature, top_p=0.9, top_k=40)
    open_row(sampler, 1, temperature=temperature)
    expect(runner, 0)
    logits = random_logits(2)
    tokens = sample(sampler, logits, [0, 1], [4, 4]).tokens
    assert 0 <= tokens[0] < VOCAB
    alone, _ = sampler_of(device)
    open_row(alone, 1, temperature=temperature)
    assert sample(alone, logits[1:], [1], [4]).tokens.tolist() == tokens[1:].tolist()


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([ProcessorCall("a")] * 9, "at most 8"),
        ([ProcessorCall("a", b'{"x":"%b"}' % (b"y" * 3000))] * 2, "at most 4096"),
        ([ProcessorCall("a", b"[1]")], "a JSON object"),
        ([ProcessorCall("a", b'{"x":\xff}')], "a JSON object"),
        ([ProcessorCall("a", b'{"x":' + b"[" * 2000 + b"]" * 2000 + b"}")], "a JSON object"),
        ([ProcessorCall("batched", b'{"x":1}')], "takes none"),
    ],
)
def test_what_comes_over_the_wire_is_checked(calls: list[ProcessorCall], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_calls(calls)
    assert (caught.value.param or "").startswith("logits_processors")
    check_calls([ProcessorCall("a", b'{"x":1}'), ProcessorCall("batched")])
