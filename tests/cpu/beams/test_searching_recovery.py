"""kill -9 of the engine in the middle of beam searches: the same hypotheses come, with the same scores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from carousel import Client, Completion, SamplingParams, StructuredOutputsParams
from tests.faults.launch import faulty_launch
from tests.harness.ring.drawn_requests import PROMPTS

TIMEOUT_S = 120.0
NUM_TOKENS = 100
SEARCH = SamplingParams(
    max_tokens=NUM_TOKENS, n=2, use_beam_search=True, beam_width=4, ignore_eos=True, logprobs=1
)
RULES = msgspec.structs.replace(
    SEARCH, repetition_penalty=1.3, no_repeat_ngram_size=4, logit_bias={11: 2.0}, bad_words=("return",)
)


GUIDED = msgspec.structs.replace(SEARCH, ignore_eos=False)
LETTERS = StructuredOutputsParams(regex=r"[a-z \n]{4000}")
BAN, BAN_PATH = [{"name": "ban"}], "ban=tests.harness.processors:BanRepeats"


def check_stop_string(client: Client, prompt: str) -> None:
    """The stop string ends hypotheses, and their text is without it."""
    text = client.generate(prompt, SEARCH, timeout=TIMEOUT_S).text
    stop = text[12:15]
    found = client.generate(
        prompt, msgspec.structs.replace(SEARCH, stop=(stop,), max_tokens=40), timeout=TIMEOUT_S
    )
    assert "stop" in [each.finish_reason for each in found.outputs]
    for each in found.outputs:
        assert stop not in each.text
        assert each.matched_stop == (stop if each.finish_reason == "stop" else None)
        assert each.score is not None


@pytest.mark.parametrize("role", [pytest.param("scheduler", marks=pytest.mark.full), "worker"])
def test_hypotheses_are_the_same_when_the_engine_is_killed(role: str) -> None:
    with faulty_launch("--max-beam-width", "4", "--logits-processor", BAN_PATH) as faulty:
        faulty.wait_ready()
        with Client(faulty.launch.run_dir) as client, ThreadPoolExecutor(len(PROMPTS)) as threads:

            def search(prompt: str) -> Completion:
                kind = PROMPTS.index(prompt) % 4
                if kind == 2:
                    return client.generate(prompt, GUIDED, structured_outputs=LETTERS, timeout=TIMEOUT_S)
                if kind == 3:
                    return client.generate(prompt, SEARCH, logits_processors=BAN, timeout=TIMEOUT_S)
                return client.generate(prompt, (SEARCH, RULES)[kind], timeout=TIMEOUT_S)

            assert search(PROMPTS[1]).token_ids != client.generate(PROMPTS[1], SEARCH).token_ids
            assert set(search(PROMPTS[2]).text) <= set("abcdefghijklmnopqrstuvwxyz \n")
            banned = search(PROMPTS[3]).token_ids
            assert len(set(banned)) == NUM_TOKENS
            check_stop_string(client, PROMPTS[0])
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
