"""Requests of an executor and of a batch manager go on when a process of the ring has been replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from carousel import RingClosed, SamplingParams
from carousel.trtllm.executor import GenerationExecutor
from runtime.wire.handle import attempt_of
from tests.cpu.client.test_client_recovery import CUT, TEXT, answer, replace_engine
from tests.harness.ring.batch_manager_caller import managers, request
from tests.harness.ring.fake_ring import WAIT_S, FakeRing, fake_ring


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[FakeRing]:
    with fake_ring(tmp_path, answer) as ring:
        yield ring


def test_a_request_of_an_executor_goes_on(ring: FakeRing) -> None:
    with GenerationExecutor.create(run_dir=ring.run_dir) as executor:
        result = executor.generate_async([1, 2], SamplingParams(max_tokens=5), streaming=True)
        ring.wait_request()
        replace_engine(ring)
        assert result.result(timeout=WAIT_S).outputs[0].text == TEXT
    assert attempt_of(ring.requests[1].handle) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_a_request_of_a_batch_manager_goes_on(tmp_path: Path, streaming: bool) -> None:
    with managers(tmp_path) as make:
        _, ring, caller = make(answer)
        caller.give(request(7, length=5, streaming=np.array([streaming])))
        ring.wait_request()
        if streaming:
            caller.wait_responses(1)
        replace_engine(ring)
        caller.wait_final()
    ids = [[int(each) for each in tensors["output_ids"][0, 0]] for _, tensors, _, _ in caller.responses]
    expected = [ord(character) for character in TEXT]
    assert ids == ([expected[:CUT], expected[CUT:]] if streaming else [[ord("a"), *expected]])
    assert [error for *_, error in caller.responses] == [""] * len(ids)


def test_an_executor_says_how_long_it_waits_for_one(ring: FakeRing) -> None:
    with GenerationExecutor.create(run_dir=ring.run_dir, ring_timeout=0.1) as executor:
        replace_engine(ring, "restarting")
        with pytest.raises(RingClosed, match="has lacked a process"):
            executor.generate_async([1, 2]).result(timeout=WAIT_S)
