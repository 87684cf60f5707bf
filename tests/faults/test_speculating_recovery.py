"""kill -9 of engine and grammar process in the middle of outputs that are guessed, some of them guided: the
same tokens come.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from carousel import Client, Completion, SamplingParams
from carousel import StructuredOutputsParams as Guide
from tests.faults.launch import FaultyLaunch, faulty_launch
from tests.harness.ring.drawn_requests import PROMPTS

TIMEOUT_S = 120.0
NUM_TOKENS = 400
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
    {"temperature": 0.8, "top_p": 0.9, "no_repeat_ngram_size": 5, "logprobs": 1},
]


@pytest.fixture(scope="module")
def faulty() -> Iterator[FaultyLaunch]:
    with faulty_launch("--speculative-algorithm", "NGRAM") as faulty:
        yield faulty


GUIDES = (None, Guide(regex="([a-z]{1,9} ){120}"), Guide(grammar='root ::= ("a = " [0-9] ";\\n"){120}'), None)


def sampling(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, **KINDS[seed], **fields)


@pytest.fixture(scope="module")
def off(faulty: FaultyLaunch) -> list[Completion]:
    """Outputs without guesses, where nothing happens."""
    with Client(faulty.launch.run_dir) as client, ThreadPoolExecutor(len(PROMPTS)) as threads:

        def generate(seed: int) -> Completion:
            asked = sampling(seed, speculative_num_draft_tokens=0)
            return client.generate(PROMPTS[seed], asked, timeout=TIMEOUT_S, structured_outputs=GUIDES[seed])

        outputs = list(threads.map(generate, range(len(PROMPTS))))
    assert min(len(completion.token_ids) for completion in outputs) > 100
    return outputs


@pytest.mark.parametrize("role", ["scheduler", "worker", "grammar"])
def test_guessed_outputs_are_the_same_when_the_engine_is_killed(
    faulty: FaultyLaunch, off: list[Completion], role: str
) -> None:
    """Right drafts, a prediction of all that comes, and n-grams; some of it is output before the kill."""
    faulty.wait_ready()
    with Client(faulty.launch.run_dir) as client:
        options: list[Any] = [
            {"draft_token_ids": off[0].token_ids[:64]},
            {"prediction": off[1].text},
            {"prediction": off[2].text},
            {},
        ]
        streams = [
            client.stream(
                prompt,
                sampling(seed),
                timeout=TIMEOUT_S,
                structured_outputs=GUIDES[seed],
                **options[seed],
            )
            for seed, prompt in enumerate(PROMPTS)
        ]
        got = [list(next(stream).token_ids) for stream in streams]
        pid = faulty.kill(role)
        assert all(len(ids) < len(each.token_ids) for ids, each in zip(got, off, strict=True))
        for ids, stream in zip(got, streams, strict=True):
            for delta in stream:
                ids += delta.token_ids
        assert got == [list(completion.token_ids) for completion in off]
    faulty.wait_replaced(role, pid)
    faulty.wait_ready()
    assert faulty.events("restart")[-1]["unit"] == ("grammar" if role == "grammar" else "engine")
    faulty.check_accounts()
