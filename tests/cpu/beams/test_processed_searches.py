"""Beam searches with logits processors: hypotheses are those of transformers with equal ones."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.wire.plan import BATCHED, ProcessorCall
from tests.cpu.beams.test_beams_against_transformers import SETTINGS, checkpoint
from tests.harness.ring.beam_draws import Draw, Found, assert_same, draws, found_by, plain_draw, searched
from tests.harness.ring.serving_ring import Ring, Setting

NUM_TOKENS = 12
OURS = {"bend": "Bend", "fail": "FailAt", BATCHED: "BanRepeatsTogether"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Watch:
    """Keeps what it is called with."""

    calls: ClassVar[list[tuple[int, Tensor, list[list[int]], Any]]] = []

    def __call__(
        self, request_id: int, logits: Tensor, token_ids: list[list[int]], stream: Any, client_id: Any
    ) -> None:
        self.calls.append((request_id, logits.clone(), token_ids, client_id))


class ProcessedRing(Ring):
    def settings(self, config: RuntimeConfig) -> RuntimeConfig:
        paths = [f"{name}=tests.harness.processors:{kind}" for name, kind in OURS.items()]
        return msgspec.structs.replace(config, logits_processor=",".join([*paths, f"watch={__name__}:Watch"]))


class Bent(LogitsProcessor):  # type: ignore[misc]
    """Bend of tests.harness.processors, as transformers has processors."""

    def __init__(self, factor: float, newest: int, less: float) -> None:
        self._factor, self._newest, self._less = factor, newest, less

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bent = scores * self._factor
        for row, ids in enumerate(input_ids.tolist()):
            bent[row, sorted(set(ids[-self._newest :]))] -= self._less
        return bent


class Unrepeated(LogitsProcessor):  # type: ignore[misc]
    """BanRepeatsTogether of tests.harness.processors, as transformers has processors."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids, float("-inf"))


class Asked(msgspec.Struct, frozen=True):
    """A search and its processors; `repetition`: a penalty behind them, which transformers has before its
    own.
    """

    draw: Draw
    calls: tuple[ProcessorCall, ...]
    theirs: tuple[Any, ...]
    repetition: float

    @property
    def asked(self) -> Draw:
        return self.draw._replace(repetition=self.repetition)


def asked(seed: int, count: int, vocab_size: int, num_tokens: int) -> list[Asked]:
    rng = random.Random(seed)
    some = []
    for draw in draws(seed, count, vocab_size, num_tokens):
        factor, newest, less = rng.choice([0.7, 1.0, 1.6]), rng.choice([1, 4]), rng.choice([-0.5, 1.5])
        args = json.dumps({"factor": factor, "newest": newest, "less": less}).encode()
        calls: list[ProcessorCall] = [ProcessorCall("bend", args)]
        theirs: list[Any] = [Bent(factor, newest, less)]
        if rng.random() < 0.4:  # it is called behind the others
            calls.append(ProcessorCall(BATCHED))
            theirs.append(Unrepeated())
        repetition = rng.choice([1.0, 1.0, 0.8, 1.3])
        if repetition != 1.0:
            theirs.append(RepetitionPenaltyLogitsProcessor(repetition))
        min_tokens = rng.choice([0, min(3, draw.num_tokens)])
        some.append(Asked(draw._replace(min_tokens=min_tokens), tuple(calls), tuple(theirs), repetition))
    return some


def run(path: Path, some: list[Asked], setting: Setting, *, is_taken_back: bool = False) -> list[list[Found]]:
    ring = ProcessedRing(path, setting)
    lifecycle, kv = ring.lifecycle, ring.lifecycle.kv
    try:
        handles = [ring.submit(each.draw.prompt, each.asked.sampling, processors=each.calls) for each in some]
        if is_taken_back:
            for _ in range(5):
                ring.scheduler.step([])
            for req in kv.rows.running_requests():
                lifecycle.retract(req)
            assert lifecycle.num_retracted
        generated = ring.run()
        assert not kv.pages.num_more_owners.any()
    finally:
        ring.close()
    return [found_by(generated, handle, each.draw.n) for handle, each in zip(handles, some, strict=True)]


def check(name: str, path: Path, num_draws: int, num_tokens: int, seed: int) -> None:
    model, path = checkpoint(name, path)
    eos_ids = CheckpointConfig.read(path).eos_token_ids
    some = asked(seed, num_draws, model.config.get_text_config().vocab_size, num_tokens)
    for each, got in zip(some, run(path, some, Setting(beams=8)), strict=True):
        wanted = searched(model, each.draw, eos_ids, processors=LogitsProcessorList(each.theirs))
        assert_same(got, wanted, each.draw)


@pytest.mark.parametrize("name", ["demo", "llama"])
def test_hypotheses_are_those_of_transformers_with_equal_processors(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, 16, NUM_TOKENS, seed=41)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["demo", "llama", "gemma2"])
def test_hypotheses_are_those_of_transformers_in_many_draws(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, 150, 40, seed=42)


def some_searches() -> list[Asked]:
    return asked(43, 8, CheckpointConfig.read(DEMO_MODEL).vocab_size, NUM_TOKENS)


@cache
def plain() -> list[list[Found]]:
    return run(DEMO_MODEL, some_searches(), Setting(beams=8))


@pytest.mark.parametrize("name", SETTINGS)
def test_hypotheses_with_processors_do_not_depend_on_the_setting(name: str) -> None:
    some = some_searches()
    got = run(DEMO_MODEL, some, SETTINGS[name], is_taken_back=name == "taken back")
    for each, found, wanted in zip(some, got, plain(), strict=True):
        assert_same(found, wanted, each.draw)


def test_one_call_has_all_beams_each_with_its_tokens_and_log_probabilities() -> None:
    draw = plain_draw([5, 6, 7], 6)._replace(stopping=1, penalty=0.0)
    ring = ProcessedRing(DEMO_MODEL, Setting(beams=8))
    Watch.calls.clear()
    try:
        handle = ring.submit(draw.prompt, draw.sampling, processors=[ProcessorCall("watch")])
        (best, *_) = found_by(ring.run(), handle, draw.n)
    finally:
        ring.close()
    assert len({request_id for request_id, *_ in Watch.calls}) == 1
    vocab_size = CheckpointConfig.read(DEMO_MODEL).vocab_size
    for at, (_, logits, beams, client_id) in enumerate(Watch.calls):
        assert client_id is None
        assert len(beams) == (draw.width if at else 1)
        assert logits.shape == (1, len(beams), vocab_size)
        assert torch.allclose(logits.logsumexp(2), torch.zeros(1, len(beams)), atol=1e-4)
        assert {len(ids) for ids in beams} == {len(draw.prompt) + at}
        assert all(ids[: len(draw.prompt)] == draw.prompt for ids in beams)
        assert len(set(map(tuple, beams))) == len(beams)
    # Those of the last call are in order: with no length penalty that is the order of their sums.
    last = [ids[len(draw.prompt) :] for ids in Watch.calls[-1][2]]
    assert best.tokens[: len(last[0])] in last


def test_a_search_whose_processors_change_nothing_is_the_search_without_them() -> None:
    some = [each for each in some_searches() if each.repetition == 1.0]
    watched = [msgspec.structs.replace(each, calls=(ProcessorCall("watch"),)) for each in some]
    alone = [msgspec.structs.replace(each, calls=()) for each in some]
    both = zip(
        run(DEMO_MODEL, watched, Setting(beams=8)), run(DEMO_MODEL, alone, Setting(beams=8)), strict=True
    )
    for each, (found, wanted) in zip(some, both, strict=True):
        assert_same(found, wanted, each.draw)


def test_a_processor_that_fails_ends_its_search_alone() -> None:
    draw = plain_draw([5, 6, 7], NUM_TOKENS)
    failing = ProcessorCall("fail", b'{"length": 6}')
    ring = ProcessedRing(DEMO_MODEL, Setting(beams=8))
    ended: dict[bytes, Any] = {}
    close = ring.lifecycle.output.close

    def note(closed: Any) -> None:
        ended[closed.handle] = closed
        close(msgspec.structs.replace(closed, error=None))

    ring.lifecycle.output.close = note  # type: ignore[method-assign]
    try:
        handle = ring.submit(draw.prompt, draw.sampling, processors=[failing])
        other = ring.submit(draw.prompt, draw.sampling)
        generated = ring.run()
        assert len(found_by(generated, other, draw.n)) == draw.n
        assert ring.lifecycle.kv.rows.num_running == 0
    finally:
        ring.close()
    error = ended[handle].error
    assert (error.code, error.param) == ("logits_processor_failed", "logits_processors")
    assert error.message == "logits processor fail failed: ValueError: too long: 6"
    assert not generated[handle].tokens


@pytest.mark.parametrize("left", [float("nan"), float("-inf"), float("inf")])
def test_whatever_processors_leave_a_search_ends(left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN forbids as -inf does, and what is infinite is the best there is."""

    def fill(_: Any, request_id: int, logits: Tensor, *rest: Any) -> None:
        logits[..., 1::2] = left

    monkeypatch.setattr(Watch, "__call__", fill)
    draw = plain_draw([5, 6, 7], 4)
    some = [Asked(draw, (ProcessorCall("watch"),), (), 1.0)]
    ((best, *_),) = run(DEMO_MODEL, some, Setting(beams=8))
    assert len(best.tokens) == 4
    assert {token % 2 for token in best.tokens} == {int(left > 0)}
    assert np.isfinite(best.score)
