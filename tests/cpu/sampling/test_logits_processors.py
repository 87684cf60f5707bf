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
from runtime.wire.plan import ProcessorCall, RowProcessing, check_calls
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


def open_row(sampler: Sampler, row: int, *names: str, **fields: Any) -> None:
    """A greedy row that has these processors."""
    fields = {"temperature": 0.0, "history_ids": pack_ids(PROMPT), **fields}
    made = setup(row, **fields).setup()
    if names:
        processing = RowProcessing(100 + row, "", tuple(ProcessorCall(name) for name in names))
        made = msgspec.structs.replace(
            made, features=made.features | PROCESSED, processing=processing, history_ids=pack_ids(PROMPT)
        )
    with torch.inference_mode():
        sampler.open_rows([made])


def expect(runner: ProcessorRunner, *rows: int) -> None:
    runner.expect([(row, b"") for row in rows])


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
