"""kill -9 in the middle of outputs that are drawn with logits processors, and rows that are taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from carousel import Client, SamplingParams
from tests.faults.launch import FaultyLaunch, faulty_launch

TIMEOUT_S = 120.0
PROMPTS = ["def f(x):\n", "import os\n", "class A:\n    def"]
NAMES: tuple[list[Any], ...] = ([{"name": "ban"}], [{"name": "batched"}], [])
PARAMS = SamplingParams(max_tokens=300, temperature=0.8, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def faulty() -> Iterator[FaultyLaunch]:
    kinds = {"ban": "BanRepeats", "batched": "BanRepeatsTogether"}
    paths = [f"{name}=tests.harness.processors:{kind}" for name, kind in kinds.items()]
    with faulty_launch("--logits-processor", *paths) as faulty:
        yield faulty


def begin(client: Client) -> tuple[list[list[int]], list[Any]]:
    """The first tokens of all, and the rest of them."""
    streams = [
        client.stream(prompt, PARAMS, logits_processors=names, timeout=TIMEOUT_S)
        for prompt, names in zip(PROMPTS, NAMES, strict=True)
    ]
    return [list(next(stream).token_ids) for stream in streams], streams


def rest(got: list[list[int]], streams: list[Any]) -> list[list[int]]:
    for ids, stream in zip(got, streams, strict=True):
        ids.extend(id for delta in stream for id in delta.token_ids)
    return got


@pytest.fixture(scope="module")
def expected(faulty: FaultyLaunch) -> list[list[int]]:
    """Tokens of each prompt where nothing happens."""
    with Client(faulty.launch.run_dir) as client:
        outputs = rest(*begin(client))
    assert [len(ids) for ids in outputs] == [300] * 3
    assert [len(set(ids)) == 300 for ids in outputs] == [True, True, False]
    return outputs


@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer"])
def test_the_outputs_are_the_same_when_a_process_is_killed(
    faulty: FaultyLaunch, expected: list[list[int]], role: str
) -> None:
    faulty.wait_ready()
    with Client(faulty.launch.run_dir) as client:
        begun = begin(client)
        pid = faulty.kill(role)
        assert rest(*begun) == expected
    faulty.wait_replaced(role, pid)
    faulty.wait_ready()
    faulty.check_accounts()


def test_the_outputs_are_the_same_when_rows_are_taken_back(
    faulty: FaultyLaunch, expected: list[list[int]]
) -> None:
    faulty.wait_ready()
    with Client(faulty.launch.run_dir) as client:
        begun = begin(client)
        for _ in range(3):
            client.pause_generation("retract")
            client.continue_generation()
        assert rest(*begun) == expected
