"""Executors load adapters while steps run: the worker in this process, and in processes of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from model_worker.executors import inproc
from model_worker.executors.adapter_loads import AdapterLoads
from runtime.checkpoint.adapters.lora_config import read_adapter
from runtime.wire.plan import NO_ADAPTER, AdapterFailed, AdapterLoaded, AdapterRef
from tests.cpu.worker.test_executors import PAGE_SIZE, Waits, make_config, running, scheduler_context
from tests.harness.models.adapted import ADAPTERS, MAX_RANK, merged, save_adapter
from tests.harness.models.plans import (
    FEEDBACK,
    GREEDY,
    PlanWriter,
    greedy_reference,
    save_tiny_llama,
    tokens_of,
)

PROMPT = [1, 5, 9, 33, 2, 71, 8, 8, 60]
SETTINGS: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("model")
    return path, save_tiny_llama(path)


@pytest.fixture(params=["inproc", "process"])
def executor(
    request: pytest.FixtureRequest, checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> Iterator[Any]:
    with ExitStack() as stack:
        if request.param == "process":
            yield stack.enter_context(running(checkpoint[0], tmp_path / "run", Waits(), **SETTINGS))[0]
            return
        context = stack.enter_context(
            scheduler_context(tmp_path / "run", make_config(checkpoint[0], **SETTINGS))
        )
        made = inproc.create(context, Waits())
        stack.callback(made.close)
        yield made


def ref_of(path: Path) -> AdapterRef:
    return AdapterRef(path.name, 1, read_adapter(path, MAX_RANK).version, str(path))


def answer_of(executor: Any) -> Any:
    """Wait for one."""
    end = time.monotonic() + PATIENCE_S
    while not (answers := executor.adapter_answers()):
        assert time.monotonic() < end, "no answer"
        time.sleep(0.01)
    (answer,) = answers
    return answer


def test_rows_of_a_loaded_slot_are_the_adapters(
    executor: Any, checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    hf, adapter = checkpoint[1], tmp_path / "adapter"
    save_adapter(hf, ADAPTERS["rank_8"], adapter)
    plans = PlanWriter(PAGE_SIZE)
    plans.open_row(0, PROMPT, range(1, 11), **GREEDY)
    base = tokens_of(executor.launch(plans.plan(chunks=[(0, PROMPT, True)])).result())
    executor.load_adapter(1, ref_of(adapter))
    while not (answers := executor.adapter_answers()):  # steps go on meanwhile
        base += tokens_of(executor.launch(plans.plan(decodes=[(0, FEEDBACK)])).result())
        if len(base) > 25:
            answers = [answer_of(executor)]
            break
    assert isinstance(answers[0], AdapterLoaded), answers
    assert (answers[0].slot, answers[0].version) == (1, ref_of(adapter).version)
    assert base == greedy_reference(hf, PROMPT, len(base))
    for row, slot in ((1, 1), (2, NO_ADAPTER)):
        pages = range(10 * row + 1, 10 * row + 11)
        plans.open_row(row, PROMPT, pages, adapter_slot=slot, **GREEDY)
    handles = [executor.launch(plans.plan(chunks=[(1, PROMPT, True), (2, PROMPT, True)]))]
    handles += [executor.launch(plans.plan(decodes=[(1, FEEDBACK), (2, FEEDBACK)])) for _ in range(1)]
    tokens = [tokens_of(handle.result()) for handle in handles]
    assert [pair[0] for pair in tokens] == greedy_reference(merged(hf, adapter), PROMPT, 2)
    assert [pair[1] for pair in tokens] == greedy_reference(hf, PROMPT, 2)


def test_a_load_that_fails_says_why_and_the_worker_goes_on(executor: Any, tmp_path: Path) -> None:
    executor.load_adapter(0, AdapterRef("gone", 1, "v", str(tmp_path / "gone")))
    answer = answer_of(executor)
    assert isinstance(answer, AdapterFailed)
    assert "no such directory" in answer.message
    plans = PlanWriter(PAGE_SIZE)
    plans.open_row(0, PROMPT, [1, 2, 3], **GREEDY)
    assert tokens_of(executor.launch(plans.plan(chunks=[(0, PROMPT, True)])).result())


REF = AdapterRef("name", 1, "v", "/nowhere")


def loaded(rank: int, number: int, *, num_bytes: int = 1, load_s: float = 0.5) -> AdapterLoaded:
    return AdapterLoaded(rank, 3, "v", num_bytes, load_s, number)


def test_a_slot_is_loaded_when_all_ranks_say_so() -> None:
    loads = AdapterLoads(2)
    number = loads.begin(3, REF).number
    loads.take(loaded(1, number, num_bytes=5))
    assert loads.answers() == []
    loads.take(loaded(0, number, num_bytes=7, load_s=2.0))
    assert loads.answers() == [loaded(0, number, num_bytes=12, load_s=2.0)]
    assert loads.answers() == []


def test_one_rank_that_fails_fails_the_load_once() -> None:
    loads = AdapterLoads(3)
    number = loads.begin(3, REF).number
    failed = AdapterFailed(2, 3, "v", "why", number)
    loads.take(loaded(0, number))
    loads.take(failed)
    loads.take(loaded(1, number))
    loads.take(AdapterFailed(1, 3, "v", "why else", number))
    assert loads.answers() == [failed]


def test_answers_about_a_load_that_was_given_up_are_not_given() -> None:
    """The answer may be of the same adapter, too: the slot is empty until the later load is answered."""
    loads = AdapterLoads(1)
    first = loads.begin(3, REF).number
    loads.take(loaded(0, first))
    second = loads.begin(3, REF).number
    loads.take(loaded(0, first))
    assert loads.answers() == []
    loads.take(loaded(0, second))
    loads.forget(3)
    assert loads.answers() == []
