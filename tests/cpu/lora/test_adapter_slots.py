"""Loads into slots: what does not fit is refused by its name, and what was given up is not answered."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from model_worker.adapters import slots as slots_module
from model_worker.adapters.tensors import read_parts
from model_worker.ops.torch_ops import TorchOps
from runtime.base.errors import InvalidRequest
from runtime.checkpoint.adapters.lora_config import read_adapter
from runtime.wire.plan import AdapterFailed, AdapterLoaded, AdapterRef, LoadAdapter
from tests.harness.adapters import write_adapter
from tests.harness.models.adapted import (
    ADAPTERS,
    MAX_RANK,
    Adapted,
    adapted,
    linear_modules,
    save_adapter,
    wait_for_answers,
)
from tests.harness.models.plans import save_tiny_llama

WEIGHTS = "adapter_model.safetensors"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("model")
    return path, save_tiny_llama(path)


@pytest.fixture
def served(checkpoint: tuple[Path, LlamaForCausalLM]) -> Iterator[Adapted]:
    with adapted(checkpoint[0], TorchOps()) as model:
        yield model


@pytest.fixture
def adapter(checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> Path:
    save_adapter(checkpoint[1], ADAPTERS["rank_8"], tmp_path / "adapter")
    return tmp_path / "adapter"


def load(served: Adapted, path: Path, version: str = "", slot: int = 1) -> Any:
    """Return what a load is answered."""
    served.slots.load(LoadAdapter(slot, AdapterRef("name", 1, version, str(path)), number=7))
    (answer,) = wait_for_answers(served.slots, 1)
    assert answer.slot == slot
    assert answer.number == 7
    return answer


def refusal(served: Adapted, path: Path, version: str = "") -> str:
    """Return why a load failed; a good one succeeds behind it, in the same slot."""
    answer = load(served, path, version)
    assert isinstance(answer, AdapterFailed), answer
    return answer.message


def test_an_answer_has_version_memory_and_time(served: Adapted, adapter: Path) -> None:
    version = read_adapter(adapter, MAX_RANK).version
    answer = load(served, adapter, version)
    assert isinstance(answer, AdapterLoaded)
    assert answer.version == version
    assert answer.num_bytes == sum(t.nbytes for t in load_file(adapter / WEIGHTS).values())
    assert 0 < answer.load_s < 60


def test_files_that_have_changed_are_another_adapter(
    served: Adapted, adapter: Path, checkpoint: tuple[Path, LlamaForCausalLM]
) -> None:
    version = read_adapter(adapter, MAX_RANK).version
    save_adapter(checkpoint[1], ADAPTERS["rank_16_rslora"], adapter)
    assert "have changed" in refusal(served, adapter, version)


def test_files_that_change_while_they_are_read_are_refused(
    served: Adapted, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_and_touch(*args: Any) -> Any:
        yield from read_parts(*args)
        os.utime(adapter / WEIGHTS, ns=(1, 1))

    monkeypatch.setattr(slots_module, "read_parts", read_and_touch)
    assert "have changed" in refusal(served, adapter)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", "AB")
def test_numbers_that_are_not_finite_are_refused(
    served: Adapted, adapter: Path, side: str, value: float
) -> None:
    tensors = load_file(adapter / WEIGHTS)
    name = f"base_model.model.{Q}.lora_{side}.weight"
    tensors[name][1, 2] = value
    save_file(tensors, adapter / WEIGHTS)
    assert f"lora_{side} of {Q}" in refusal(served, adapter)


def test_an_adapter_of_another_model_is_refused(
    served: Adapted, checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    shapes = linear_modules(checkpoint[1])
    wide = {name: (outputs, inputs + 16) for name, (outputs, inputs) in shapes.items()}
    deep = shapes | {Q.replace("0", "7"): (96, 48)}
    other = {"model.layers.0.self_attn.qkv_proj": (160, 48)}
    for path, given, reason in (
        (tmp_path / "wide", wide, "is for a weight"),
        (tmp_path / "deep", deep, "the model has no linear layers model.layers.7.self_attn.q_proj"),
        (tmp_path / "other", other, "the model has no linear layers model.layers.0.self_attn.qkv_proj"),
    ):
        write_adapter(path, given)
        assert reason in refusal(served, path)
        with pytest.raises(InvalidRequest, match=reason):
            served.slots.check(path)


def test_an_adapter_with_less_than_it_names_is_refused(
    served: Adapted, checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    shapes = linear_modules(checkpoint[1])
    del shapes[Q]
    write_adapter(tmp_path / "part", shapes)
    assert f"target_modules: there are no weights of {Q}" in refusal(served, tmp_path / "part")


def test_what_cannot_be_read_is_said_and_the_next_load_works(served: Adapted, adapter: Path) -> None:
    assert "no such directory" in refusal(served, adapter / "none")
    data = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(data[:-1])
    assert "cut short" in refusal(served, adapter)
    (adapter / WEIGHTS).write_bytes(data)
    assert isinstance(load(served, adapter), AdapterLoaded)


def test_a_fault_of_ours_is_an_answer_too(
    served: Adapted, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "check_fit", lambda *args: 1 / 0)
    assert "ZeroDivisionError" in refusal(served, adapter)


def test_a_load_that_is_given_up_is_not_answered(
    served: Adapted, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was replaced, and one that was dropped, both while they were read."""
    go_on = threading.Event()

    def held_back(*args: Any) -> Any:
        assert go_on.wait(60)
        return read_adapter(*args)

    monkeypatch.setattr(slots_module, "read_adapter", held_back)
    ref = AdapterRef("name", 1, "", str(adapter))
    served.slots.load(LoadAdapter(0, ref, number=1))
    served.slots.load(LoadAdapter(1, ref, number=2))
    served.slots.load(LoadAdapter(0, ref, number=3))
    served.slots.drop(1)
    assert served.slots.answers() == []
    go_on.set()
    (answer,) = wait_for_answers(served.slots, 1)
    assert (answer.slot, answer.number) == (0, 3)
    served.slots.close()
    assert served.slots.answers() == []


def test_a_load_takes_one_thread_and_is_niced(
    served: Adapted, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int]] = []

    def read_in_thread(*args: Any) -> Any:
        own = threading.get_native_id()
        seen.append((own, os.getpriority(os.PRIO_PROCESS, own), torch.get_num_threads()))
        return read_parts(*args)

    monkeypatch.setattr(slots_module, "read_parts", read_in_thread)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    load(served, adapter)
    load(served, adapter)
    assert len({thread for thread, _, _ in seen}) == 1
    assert {(nice, threads) for _, nice, threads in seen} == {(max(before, slots_module.NICENESS), 1)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_load_of_a_process_that_is_nicer_stays_as_nice() -> None:
    """Nobody without a right to it may lower that again, and the load would fail."""

    def niceness() -> int:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, 19)
        slots_module._be_nice(threading.Barrier(1))
        return os.getpriority(os.PRIO_PROCESS, own)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(niceness).result() == 19
