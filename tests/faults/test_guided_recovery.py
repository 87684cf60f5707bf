"""kill -9 of engine and grammar process in the middle of guided outputs: the same tokens come."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from carousel import Client, SamplingParams
from carousel import StructuredOutputsParams as Guide
from tests.faults.launch import FaultyLaunch, faulty_launch

TIMEOUT_S = 120.0
GUIDES = (
    Guide(regex="([a-z]{1,9} ){120}"),
    Guide(
        json={"type": "array", "items": {"type": "integer", "maximum": 9999, "minimum": 0}, "minItems": 90}
    ),
    Guide(grammar='root ::= line{90}\nline ::= [A-Z] "=" [0-9]+ ";"'),
    None,
)


@pytest.fixture(scope="module", params=["llguidance", pytest.param("xgrammar", marks=pytest.mark.full)])
def faulty(request: pytest.FixtureRequest) -> Iterator[FaultyLaunch]:
    with faulty_launch(f"--grammar-backend={request.param}") as faulty:
        yield faulty


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=400, seed=seed, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(faulty: FaultyLaunch) -> list[list[int]]:
    """Tokens of each guide where nothing happens."""
    with Client(faulty.launch.run_dir) as client:
        streams = [
            client.stream("x", sampling(seed), structured_outputs=guide, timeout=TIMEOUT_S)
            for seed, guide in enumerate(GUIDES)
        ]
        outputs = [[token for delta in stream for token in delta.token_ids] for stream in streams]
    assert min(map(len, outputs)) > 100
    return outputs


@pytest.mark.parametrize("role", ["grammar", "scheduler", "worker", "tokenizer"])
def test_guided_outputs_are_the_same_when_a_process_is_killed(
    faulty: FaultyLaunch, expected: list[list[int]], role: str
) -> None:
    faulty.wait_ready()
    with Client(faulty.launch.run_dir) as client:
        streams = [
            client.stream("x", sampling(seed), structured_outputs=guide, timeout=TIMEOUT_S)
            for seed, guide in enumerate(GUIDES)
        ]
        got = [list(next(stream).token_ids) for stream in streams]
        pid = faulty.kill(role)
        for ids, stream in zip(got, streams, strict=True):
            for delta in stream:
                ids += delta.token_ids
        assert got == expected
    faulty.wait_replaced(role, pid)
    faulty.wait_ready()
    assert faulty.events("restart")[-1]["unit"] == (role if role in ("grammar", "tokenizer") else "engine")
    faulty.check_accounts()


def test_a_stopped_grammar_process_holds_up_nobody_and_is_replaced(
    faulty: FaultyLaunch, expected: list[list[int]]
) -> None:
    """Requests without a guide go on meanwhile; those with one wait for the process in its place."""
    faulty.wait_ready()
    with Client(faulty.launch.run_dir) as client:
        guided = client.stream("x", sampling(0), structured_outputs=GUIDES[0], timeout=TIMEOUT_S)
        ids = list(next(guided).token_ids)
        pid = faulty.kill("grammar", signal.SIGSTOP)
        waits = client.stream("x", sampling(1), structured_outputs=Guide(choice=["here"]), timeout=TIMEOUT_S)
        plain = SamplingParams(max_tokens=8, ignore_eos=True)
        assert len(client.generate("x", plain, timeout=TIMEOUT_S).token_ids) == 8
        assert faulty.launch.pid_of("grammar") == pid
        for delta in guided:
            ids += delta.token_ids
        assert ids == expected[0]
        assert "".join(delta.text for delta in waits) == "here"
    faulty.wait_replaced("grammar", pid)
    assert faulty.events("hang")[-1]["process"] == "grammar"
    faulty.wait_ready()
    faulty.check_accounts()


def test_a_guide_that_comes_while_there_is_no_grammar_process_waits_for_the_next(
    faulty: FaultyLaunch,
) -> None:
    faulty.wait_ready()
    pid = faulty.kill("grammar")
    with Client(faulty.launch.run_dir) as client:
        got = client.generate("x", sampling(1), structured_outputs=Guide(choice=["here"]), timeout=TIMEOUT_S)
    assert (got.text, got.finish_reason) == ("here", "stop")
    faulty.wait_replaced("grammar", pid)
    faulty.check_accounts()
