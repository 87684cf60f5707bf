"""Speculation in a whole launch: the same output with and without guesses, whoever makes them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from carousel import Client, Completion, InvalidRequest, SamplingParams
from carousel import StructuredOutputsParams as Guide
from tests.harness.ring.drawn_requests import PROMPTS, check_equal
from tests.harness.ring.launched import Launched, launched, wait_until

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top-k": {"top_k": 20, "temperature": 0.7},
    "top-p": {"top_p": 0.8},
    "top-p decay": {"top_p": 0.9, "top_p_decay": 0.97, "top_p_min": 0.2},
    "min-p": {"min_p": 0.1},
    "penalties": {"temperature": 0.5, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.3},
    "n-gram ban": {"temperature": 0.0, "no_repeat_ngram_size": 4},
    "bad words": {"temperature": 0.0, "bad_words": ["return a"]},
    "logit bias": {"temperature": 0.3, "logit_bias": {10: 2.0, 100: -3.0}},
    "min tokens": {"temperature": 0.0, "min_tokens": 20, "ignore_eos": False},
    "stop string": {"temperature": 0.0, "stop": ("return", "print(")},
    "max_tokens 1": {"temperature": 0.0, "max_tokens": 1},
    "max_tokens 7": {"temperature": 0.0, "max_tokens": 7},
}


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    arguments = ("--dtype", "float32", "--speculative-algorithm", "NGRAM", "--max-running-requests", "8")
    with launched(*arguments) as launch:
        yield launch


@pytest.fixture(scope="module")
def client(launch: Launched) -> Iterator[Client]:
    with Client(launch.run_dir) as client:
        yield client


def sampling(kind: str, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 48, "seed": 7, "logprobs": 2, **KINDS[kind], **fields})


def num_accepted(completion: Completion) -> int:
    assert completion.usage.drafts is not None
    return completion.usage.drafts.num_accepted


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_the_same_with_and_without_guesses(client: Client, kind: str) -> None:
    asked = sampling(kind)
    found = client.generate(PROMPTS, asked)
    off = client.generate(PROMPTS, sampling(kind, speculative_num_draft_tokens=0))
    for one, other in zip(found, off, strict=True):
        check_equal(one, other)
        assert other.usage.drafts is None
        assert num_accepted(one) <= one.usage.completion_tokens - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [0, pytest.param(1, marks=pytest.mark.full)])
def test_drafts_of_a_request_change_nothing_but_the_steps(client: Client, kind: str, prompt: int) -> None:
    """All right, or wrong in every fifth place; with n = 2 the second sequence verifies them too."""
    asked = sampling(kind, speculative_num_draft_tokens=0, n=2)
    off = client.generate(PROMPTS[prompt], asked)
    for wrong in (0, 5):
        drafts = [
            (token + 1) % 200 if wrong and place % wrong == wrong - 1 else token
            for place, token in enumerate(off.token_ids)
        ]
        found = client.generate(PROMPTS[prompt], asked, draft_token_ids=drafts)
        check_equal(found, off)
        drafted = found.outputs[0].usage
        assert drafted is not None
        assert drafted.drafts is not None
        most = len(drafts) if not wrong else wrong - 1
        assert min(most, len(off.token_ids) - 1) <= drafted.drafts.num_accepted <= most


def generate_with_right(
    client: Client, prompt: Any, asked: SamplingParams, expected: Completion, least: int, **fields: Any
) -> None:
    """Generate until at least so many guesses of the first sequence are right; each time with the expected
    output. A guided row whose masks come late, as on a busy machine, makes no guesses for a while.
    """

    def are_right() -> bool:
        found = client.generate(prompt, asked, **fields)
        check_equal(found, expected)
        usage = found.outputs[0].usage
        assert usage is not None
        assert usage.drafts is not None
        return bool(usage.drafts.num_accepted >= least)

    wait_until(are_right, 10.0, f"{least} guesses are right")


SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["red", "green", "blue"]}, "year": {"type": "integer"}},
        "required": ["name", "year"],
    },
    "minItems": 9,
    "maxItems": 9,
}
"""Much of an output comes again: keys, marks, names."""
OFTEN = {"greedy", "temperature 1", "penalties", "min tokens"}


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_guided_outputs_are_the_same_with_and_without_guesses(client: Client, kind: str) -> None:
    """Guesses are n-grams, a prediction, and drafts with and without mistakes, with what the guide forbids
    and with more than comes. n sequences have a matcher each.
    """
    asked: dict[str, Any] = {"structured_outputs": Guide(json=SCHEMA, disable_any_whitespace=True)}
    off = client.generate(PROMPTS[0], sampling(kind, speculative_num_draft_tokens=0, n=2), **asked)
    ids = off.token_ids
    check_equal(client.generate(PROMPTS[0], sampling(kind, n=2), **asked), off)
    for wrong in (0, 5, 1):
        drafts = [
            (token + 1) % 200 if wrong and place % wrong == wrong - 1 else token
            for place, token in enumerate(ids)
        ]
        fields = {**asked, "draft_token_ids": [*drafts, 9, 10]}
        generate_with_right(
            client, PROMPTS[0], sampling(kind, n=2), off, wrong - 1 if wrong else len(ids) - 1, **fields
        )
    found = client.generate(PROMPTS[0], sampling(kind, n=2), **asked, prediction=off.text)
    check_equal(found, off)


def test_drafts_behind_the_end_of_a_guide_count_for_nothing(client: Client) -> None:
    """A closed output ends with `stop` where it is complete, whatever was guessed behind it."""
    for guide in (Guide(choice=["red"]), Guide(regex="(ab)+"), Guide(regex="a{3}")):
        asked: dict[str, Any] = {"structured_outputs": guide}
        off = client.generate("x", sampling("greedy", speculative_num_draft_tokens=0), **asked)
        drafts = [*off.token_ids[:40], *off.token_ids[:9], 5, 6]
        fields = {**asked, "draft_token_ids": drafts}
        generate_with_right(client, "x", sampling("greedy"), off, min(len(off.token_ids), 40) - 1, **fields)


def test_a_prediction_of_guided_output_is_right(client: Client) -> None:
    asked: dict[str, Any] = {"structured_outputs": Guide(json=SCHEMA)}
    fields = {"max_tokens": 200, "temperature": 0.0}
    off = client.generate("x", sampling("greedy", speculative_num_draft_tokens=0, **fields), **asked)
    wait_until(
        lambda: num_accepted(client.generate("x", sampling("greedy", **fields), **asked)) > 10,
        10.0,
        "more than 10 guesses of n-grams are right",
    )

    def is_right() -> bool:
        found = client.generate("x", sampling("greedy", **fields), **asked, prediction=off.text)
        check_equal(found, off)
        assert found.usage.drafts is not None
        return bool(found.usage.drafts.num_accepted_prediction > 0)

    wait_until(is_right, 10.0, "guesses from the prediction are right")


def test_text_that_repeats_takes_fewer_steps(client: Client) -> None:
    """The worth of guesses is measured, which other work on the machine disturbs at times."""
    asked = sampling("greedy", max_tokens=100, ignore_eos=True)
    wait_until(
        lambda: num_accepted(client.generate(PROMPTS[3], asked)) > 20, 10.0, "more than 20 guesses are right"
    )


@pytest.mark.parametrize("num_requests", [300, pytest.param(1000, marks=pytest.mark.full)])
def test_sums_agree_over_many_requests(launch: Launched, client: Client, num_requests: int) -> None:
    """Figures that callers are told, against what the server counts in all and shows as metrics."""
    count = re.compile(r"^sglang:spec_decode_num_(\w+)_total\S* (\S+)$", re.MULTILINE)

    def totals() -> list[float]:
        info, metrics = (httpx.get(launch.url + path, timeout=60) for path in ("/server_info", "/metrics"))
        body, metric = info.json(), dict(count.findall(metrics.text))
        by_position = body["draft_tokens_by_position"], body["accepted_draft_tokens_by_position"]
        assert [sum(each) for each in by_position] == [
            body["num_draft_tokens"],
            body["num_accepted_draft_tokens"],
        ]
        assert float(metric["draft_tokens"]) == body["num_draft_tokens"]
        assert float(metric["accepted_tokens"]) == body["num_accepted_draft_tokens"]
        return [body["num_draft_tokens"], body["num_accepted_draft_tokens"]]

    kinds = list(KINDS)

    def num_right() -> float:
        before = totals()
        found = client.generate(
            [PROMPTS[i % len(PROMPTS)] for i in range(num_requests)],
            [
                sampling(kinds[i % len(kinds)], seed=i, max_tokens=1 + i % 12, min_tokens=i % 2)
                for i in range(num_requests)
            ],
            timeout=600.0,
        )
        after = totals()
        for completion in found:
            usage = completion.usage
            assert usage.completion_tokens == len(completion.token_ids)
            assert usage.drafts is not None
            assert usage.drafts.num_accepted <= min(usage.drafts.num_drafted, usage.completion_tokens - 1)
        drafts = [completion.usage.drafts for completion in found if completion.usage.drafts is not None]
        assert sum(each.num_drafted for each in drafts) == after[0] - before[0]
        assert sum(each.num_accepted for each in drafts) == after[1] - before[1]
        return after[1] - before[1]

    wait_until(lambda: num_right() > 100, 30.0, "more than 100 guesses are right")


def test_guesses_behind_a_prompt_whose_logprobs_are_wanted(client: Client) -> None:
    asked = sampling("greedy", prompt_logprobs=1)
    off = client.generate(PROMPTS[0], sampling("greedy", prompt_logprobs=1, speculative_num_draft_tokens=0))
    found = client.generate(PROMPTS[0], asked, draft_token_ids=off.token_ids[:20])
    check_equal(found, off)
    for one, other in zip(found.prompt_logprobs[1:], off.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-5)
    assert num_accepted(found) >= 20


def test_a_prediction_over_http_is_counted_and_so_are_all(launch: Launched) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Write add(a, b) in Python."}],
        "temperature": 0.0,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        off = http.post("/v1/chat/completions", json={**body, "speculative_num_draft_tokens": 0}).json()
        text = off["choices"][0]["message"]["content"]
        asked = {**body, "prediction": {"type": "content", "content": text}}

        def is_right() -> bool:
            found = http.post("/v1/chat/completions", json=asked).json()
            assert found["choices"][0]["message"]["content"] == text
            num_right: int = found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
            return num_right > 0

        wait_until(is_right, 10.0, "guesses from the prediction are right")
        refused = http.post("/v1/chat/completions", json={**asked, "speculative_num_draft_tokens": 9})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "speculative_num_draft_tokens"
        info = http.get("/server_info").json()
        metrics = http.get("/metrics").text
    assert info["num_accepted_draft_tokens"] > 0
    assert sum(info["accepted_draft_tokens_by_position"]) == info["num_accepted_draft_tokens"]
    assert "sglang:spec_decode_num_accepted_tokens_total" in metrics


def test_drafts_outside_the_vocabulary_are_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="draft_token_ids"):
        client.generate(PROMPTS[0], sampling("greedy"), draft_token_ids=[1 << 30])
