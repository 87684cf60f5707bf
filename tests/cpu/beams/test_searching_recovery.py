"""kill -9 of the engine in the middle of beam searches: the same hypotheses come, with the same scores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from carousel import Client, Completion, SamplingParams
from tests.faults.launch import faulty_launch
from tests.harness.ring.drawn_requests import PROMPTS

TIMEOUT_S = 120.0
NUM_TOKENS = 200
SEARCH = SamplingParams(
    max_tokens=NUM_TOKENS, n=2, use_beam_search=True, beam_width=4, ignore_eos=True, logprobs=1
)
RULES = msgspec.structs.replace(
    SEARCH, repetition_penalty=1.3, no_repeat_ngram_size=4, logit_bias={11: 2.0}, bad_words=("return",)
)


@pytest.mark.parametrize("role", [pytest.param("scheduler", marks=pytest.mark.full), "worker"])
def test_hypotheses_are_the_same_when_the_engine_is_killed(role: str) -> None:
    with faulty_launch("--max-beam-width", "4") as faulty:
        faulty.wait_ready()
        with Client(faulty.launch.run_dir) as client, ThreadPoolExecutor(len(PROMPTS)) as threads:

            def search(prompt: str) -> Completion:
                has_rules = PROMPTS.index(prompt) % 2
                return client.generate(prompt, RULES if has_rules else SEARCH, timeout=TIMEOUT_S)

            assert search(PROMPTS[1]).token_ids != client.generate(PROMPTS[1], SEARCH).token_ids
            expected = list(threads.map(search, PROMPTS))
            assert all(each.outputs[0].score is not None for each in expected)
            assert all(len(output.token_ids) == NUM_TOKENS for each in expected for output in each.outputs)
            stream = client.stream("def main():", SamplingParams(max_tokens=20), timeout=TIMEOUT_S)
            searches = [threads.submit(search, prompt) for prompt in PROMPTS]
            next(stream)  # what was sent with it or soon after is under way
            pid = faulty.kill(role)
            assert not any(each.done() for each in searches)
            got = [each.result() for each in searches]
            for one, other in zip(got, expected, strict=True):
                assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
                assert [o.score for o in one.outputs] == [o.score for o in other.outputs]
                assert [o.logprobs for o in one.outputs] == [o.logprobs for o in other.outputs]
        faulty.wait_replaced(role, pid)
        faulty.wait_ready()
        faulty.check_accounts()
