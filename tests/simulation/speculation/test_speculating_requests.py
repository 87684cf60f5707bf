"""Requests that bring guesses: what they get in the scheduler, what is counted, what is refused."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from carousel import ExternalDraftTokensConfig, GenerationRequest, SamplingParams
from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.submission import Submission
from runtime.base.errors import InvalidRequest
from runtime.sampling.table import MAX_DRAFT_TOKENS
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import DraftCounts, GenerateRequest, TokenizedRequest
from scheduler_proc.features.speculation.speculation import SpeculationSettings
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.fake_sampling import VOCAB_SIZE
from tokenizer_proc.validation import MAX_PREDICTION_CHARS, Validator

NGRAM = SpeculationSettings(True, 4)
PROMPT = [7, 8, 9, 10]
NUM_TOKENS = 40


def output_of(prompt: list[int], max_tokens: int) -> list[int]:
    with running() as system:
        request = message(1, prompt, max_tokens=max_tokens)
        run_until_idle(system, request)
        return system.detokenizer.tokens[request.handle]


def run(request: TokenizedRequest, **changes: Any) -> tuple[list[int], DraftCounts | None, int]:
    """(output, what was counted, steps) of a request alone."""
    with running(**changes) as system:
        run_until_idle(system, request)
        closed = system.detokenizer.closed[request.handle]
        assert closed.error is None
        return system.detokenizer.tokens[request.handle], closed.drafts, system.scheduler.num_steps


def refusal(request: TokenizedRequest, **changes: Any) -> tuple[str | None, str]:
    with running(**changes) as system:
        run_until_idle(system, request)
        error = system.detokenizer.closed[request.handle].error
        assert error is not None
        assert error.status == 400
        return error.param, error.message


# -- drafts and predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_right_drafts_come_out_of_the_step_of_the_prompt(depth: int) -> None:
    expected = output_of(PROMPT, NUM_TOKENS)
    request = message(1, PROMPT, max_tokens=NUM_TOKENS, draft_ids=pack_ids(expected[:20]))
    output, drafts, num_steps = run(request, depth=depth, budget=256)
    assert output == expected
    assert drafts == DraftCounts(20, 20)
    assert num_steps == NUM_TOKENS - 20


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    expected = output_of(PROMPT, NUM_TOKENS)
    drafts = [*expected[:5], (expected[5] + 1) % VOCAB_SIZE, *expected[6:20]]
    request = message(1, PROMPT, max_tokens=NUM_TOKENS, draft_ids=pack_ids(drafts))
    output, counts, _ = run(request, budget=256)
    assert output == expected
    assert counts == DraftCounts(20, 5)


def test_n_grams_guess_as_soon_as_all_drafts_are_used() -> None:
    """The prompt's step has room for four of five drafts; its token is the fifth. The first
    n-gram guesses are two, then four: steps of three, five and what is left.
    """
    sampling = {"allowed_token_ids": (3,)}
    request = message(1, [3, 3, 3], max_tokens=15, draft_ids=pack_ids([3] * 5), sampling=sampling)
    with running(speculation=NGRAM, budget=11) as system:
        cost = system.scheduler.step_cost
        assert cost is not None
        cost.most = 4
        cost.note_step = lambda *_: None  # type: ignore[method-assign]
        run_until_idle(system, request)
        assert system.detokenizer.tokens[request.handle] == [3] * 15
        assert system.scheduler.num_steps == 4


def test_drafts_that_a_step_has_no_room_for_are_verified_in_the_next() -> None:
    expected = output_of(PROMPT, NUM_TOKENS)
    request = message(1, PROMPT, max_tokens=NUM_TOKENS, draft_ids=pack_ids(expected[:30]))
    output, counts, num_steps = run(request, budget=16)
    assert output == expected
    assert counts is not None
    assert counts.num_accepted == NUM_TOKENS - num_steps > 20


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_guesses_never_go_beyond_max_tokens(max_tokens: int) -> None:
    expected = output_of(PROMPT, NUM_TOKENS)
    request = message(1, PROMPT, max_tokens=max_tokens, draft_ids=pack_ids(expected))
    output, counts, num_steps = run(request, budget=256)
    assert output == expected[:max_tokens]
    assert counts == DraftCounts(max_tokens - 1, max_tokens - 1)
    assert num_steps == 1


def test_a_stop_id_inside_an_accepted_run_ends_the_output_there() -> None:
    expected = output_of(PROMPT, NUM_TOKENS)
    stop = expected[6]
    end = expected.index(stop) + 1
    request = message(
        1, PROMPT, NUM_TOKENS, draft_ids=pack_ids(expected[:20]), sampling={"stop_token_ids": (stop,)}
    )
    output, counts, _ = run(request, budget=256)
    assert output == expected[:end]
    assert counts == DraftCounts(20, end - 1)


def test_each_of_several_sequences_verifies_the_drafts() -> None:
    """The tokenizer gives them to each; here two sequences whose seeds differ."""
    expected = output_of(PROMPT, NUM_TOKENS)
    with running(budget=256, depth=2) as system:
        requests = [message(i, PROMPT, NUM_TOKENS, draft_ids=pack_ids(expected[:8])) for i in (1, 2)]
        run_until_idle(system, *requests)
        for request in requests:
            assert system.detokenizer.tokens[request.handle] == expected
            assert system.detokenizer.closed[request.handle].drafts == DraftCounts(8, 8)


def test_a_prediction_that_is_right_saves_steps_and_is_counted() -> None:
    expected = output_of(PROMPT, NUM_TOKENS)
    request = message(1, PROMPT, max_tokens=NUM_TOKENS, prediction_ids=pack_ids(expected))
    output, counts, num_steps = run(request, speculation=NGRAM, depth=2)
    assert output == expected
    assert counts is not None
    assert counts.num_accepted_prediction >= 20
    assert counts.num_rejected_prediction <= 6
    assert num_steps <= NUM_TOKENS - counts.num_accepted + 1  # one may be planned behind the end


def test_a_prediction_that_differs_in_places_is_found_again() -> None:
    expected = output_of(PROMPT, NUM_TOKENS)
    prediction = [(token + 1) % VOCAB_SIZE if i % 10 == 9 else token for i, token in enumerate(expected)]
    request = message(1, PROMPT, max_tokens=NUM_TOKENS, prediction_ids=pack_ids(prediction))
    output, counts, _ = run(request, speculation=NGRAM)
    assert output == expected
    assert counts is not None
    assert counts.num_accepted_prediction >= 12
    assert counts.num_rejected_prediction > 0


def test_an_output_that_repeats_itself_is_guessed_from_itself() -> None:
    """One id is allowed, so the output goes round."""
    request = message(1, [3, 3, 3], max_tokens=NUM_TOKENS, sampling={"allowed_token_ids": (3,)})
    output, counts, num_steps = run(request, speculation=NGRAM, depth=2)
    assert output == [3] * NUM_TOKENS
    assert counts is not None
    assert counts.num_accepted > NUM_TOKENS / 2
    assert num_steps <= NUM_TOKENS - counts.num_accepted + 1


def test_who_wants_no_guesses_gets_none() -> None:
    sampling = {"allowed_token_ids": (3,), "speculative_num_draft_tokens": 0}
    request = message(1, [3, 3, 3], max_tokens=NUM_TOKENS, sampling=sampling)
    _, counts, num_steps = run(request, speculation=NGRAM)
    assert counts is None
    assert num_steps == NUM_TOKENS


def counted_requests(count: int) -> list[TokenizedRequest]:
    """Two ids are allowed, so n-grams are found; some have drafts or a prediction of them, right in places,
    or stop at one of them, or want logprobs.
    """
    rng = random.Random(4)
    requests = []
    for i in range(count):
        ids = (3, i % 5)
        guesses = pack_ids(rng.choices(ids, k=rng.randrange(1, 20)))
        fields: dict[str, Any] = rng.choice([{}, {}, {"draft_ids": guesses}, {"prediction_ids": guesses}])
        sampling: dict[str, Any] = {"allowed_token_ids": ids, **rng.choice([{}, {"logprobs": 1}])}
        if i % 7 == 0:
            sampling["stop_token_ids"] = (i % 5,)
        requests.append(message(i, [3, i % 5, 3, i % 5], 1 + i % 30, sampling=sampling, **fields))
    return requests


@pytest.mark.parametrize("num_requests", [200, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize(("depth", "num_pages"), [(1, 64), (2, 20)])
def test_counts_agree_over_many_requests(depth: int, num_pages: int, num_requests: int) -> None:
    """Tokens less the steps that gave a row some are the accepted ones, of each and of all; in a small pool
    rows are taken back, too.
    """
    requests = counted_requests(num_requests)
    with running(
        speculation=NGRAM, depth=depth, num_pages=num_pages, max_len=48, max_iterations=30_000
    ) as system:
        num_steps: Counter[bytes] = Counter()
        add = system.output.add

        def count(handle: bytes, tokens: list[int]) -> None:
            num_steps[handle] += 1
            add(handle, tokens)

        system.output.add = count  # type: ignore[method-assign]
        run_until_idle(system, *requests, max_steps=30_000)
        assert (system.lifecycle.num_retracted > 0) == (num_pages == 20)
        closed = [system.detokenizer.closed[r.handle].drafts or DraftCounts() for r in requests]
        for request, each in zip(requests, closed, strict=True):
            num_tokens = len(system.detokenizer.tokens[request.handle])
            assert each.num_accepted == num_tokens - num_steps[request.handle]
            num_predicted = each.num_accepted_prediction + each.num_rejected_prediction
            assert num_predicted <= each.num_drafted
            assert bool(request.prediction_ids) or not num_predicted
        totals: dict[str, Any] = dict(system.stats.totals())
        assert sum(each.num_accepted for each in closed) == totals["num_accepted_draft_tokens"] > num_requests
        assert sum(each.num_accepted_prediction for each in closed) > num_requests / 20
        assert sum(each.num_rejected_prediction for each in closed) > num_requests / 20
        assert sum(each.num_drafted for each in closed) == totals["num_draft_tokens"]
        assert sum(totals["draft_tokens_by_position"]) == totals["num_draft_tokens"]
        assert sum(totals["accepted_draft_tokens_by_position"]) == totals["num_accepted_draft_tokens"]
        records = [each.spec_dec_stats for each in system.stats.iterations_after(0, 30_000).records]
        verified = [step for step in records if step is not None]
        assert sum(step.num_requests_with_draft_tokens for step in verified) == totals["num_drafts"]
        assert sum(step.num_draft_tokens for step in verified) == totals["num_draft_tokens"]
        assert sum(step.num_accepted_tokens for step in verified) == totals["num_accepted_draft_tokens"]
        for step in verified:
            length = step.num_accepted_tokens / step.num_requests_with_draft_tokens + 1
            assert step.acceptance_length == pytest.approx(length)


def test_statistics_of_a_request_tell_its_tokens_a_step() -> None:
    expected = output_of(PROMPT, NUM_TOKENS)
    request = message(1, PROMPT, max_tokens=NUM_TOKENS, draft_ids=pack_ids(expected[:19]))
    with running(budget=256, max_request_iterations=100) as system:
        run_until_idle(system, request)
        last = system.stats.requests_after(0, 1000, ()).records[-1].request_stats[0]
        assert last.avg_num_decoded_tokens_per_iter == NUM_TOKENS / (NUM_TOKENS - 19)


# -- what is refused -----------------------------------------------------------------------------------------


def test_more_guesses_than_the_server_makes_are_refused() -> None:
    asked = {"speculative_num_draft_tokens": 5}
    param, text = refusal(message(1, PROMPT, sampling=asked), speculation=NGRAM)
    assert param == "speculative_num_draft_tokens"
    assert "at most 4" in text
    param, text = refusal(message(1, PROMPT, sampling=asked))
    assert "without --speculative-algorithm NGRAM" in text


def test_a_prediction_that_nothing_looks_in_is_refused() -> None:
    param, text = refusal(message(1, PROMPT, prediction_ids=pack_ids([1])))
    assert param == "prediction"
    assert "without --speculative-algorithm NGRAM" in text
    off = message(1, PROMPT, prediction_ids=pack_ids([1]), sampling={"speculative_num_draft_tokens": 0})
    assert refusal(off, speculation=NGRAM)[0] == "prediction"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"draft_ids": pack_ids([VOCAB_SIZE])}, "draft_ids"),
        ({"draft_ids": b"123"}, "draft_ids"),
        ({"draft_ids": pack_ids([1] * (MAX_DRAFT_TOKENS + 1))}, "draft_ids"),
        ({"prediction_ids": pack_ids([-1])}, "prediction"),
    ],
)
def test_guesses_that_cannot_be_verified_are_refused_by_the_scheduler(
    fields: dict[str, Any], param: str
) -> None:
    assert refusal(message(1, PROMPT, **fields), speculation=NGRAM)[0] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"draft_ids": pack_ids([100])}, "draft_token_ids"),
        ({"draft_ids": pack_ids([-1])}, "draft_token_ids"),
        ({"draft_ids": b"123"}, "draft_token_ids"),
        ({"draft_ids": pack_ids([1] * (MAX_DRAFT_TOKENS + 1))}, "draft_token_ids"),
        ({"prediction": "x" * (MAX_PREDICTION_CHARS + 1)}, "prediction"),
        ({"prediction": "x" * (1 << 20)}, "prediction"),
    ],
)
def test_bad_guesses_are_refused_by_the_tokenizer(fields: dict[str, Any], param: str) -> None:
    validator = Validator(vocab_size=100, context_length=32)
    asked = GenerateRequest(make_handle(1, 1), SamplingParams(seed=1), text="x", **fields)
    with pytest.raises(InvalidRequest) as caught:
        validator.check_request(asked)
    assert caught.value.param == param


@pytest.mark.parametrize("fields", [{"draft_ids": pack_ids([1])}, {"prediction": "x"}])
def test_embeddings_have_nothing_to_guess(fields: dict[str, Any]) -> None:
    validator = Validator(vocab_size=100, context_length=32, task="embed")
    asked = GenerateRequest(make_handle(1, 1), SamplingParams(seed=1), text="x", task="embed", **fields)
    with pytest.raises(InvalidRequest, match="an embedding has no output to guess"):
        validator.check_request(asked)


def test_a_prediction_needs_a_tokenizer() -> None:
    validator = Validator(vocab_size=100, context_length=32, takes_text=False)
    asked = GenerateRequest(
        make_handle(1, 1), SamplingParams(seed=1), input_ids=pack_ids([1]), prediction="x"
    )
    with pytest.raises(InvalidRequest, match="prediction"):
        validator.check_request(asked)


# -- as callers write them -----------------------------------------------------------------------------------


def test_the_executors_drafts_reach_the_wire() -> None:
    config = ExternalDraftTokensConfig(np.array([4, 5]))
    request = GenerationRequest([1], external_draft_tokens_config=config)
    built = build_request(make_handle(1, 1), request.submission())
    assert unpack_ids(built.draft_ids).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": "ab"}, "tokens"),
        ({"tokens": [1] * (MAX_DRAFT_TOKENS + 1)}, "tokens"),
        ({"tokens": [1], "draft_logits": [[0.0]]}, "draft_logits"),
        ({"tokens": [1], "acceptance_threshold": 0.5}, "acceptance_threshold"),
        ({"tokens": [1], "fast_logits": True}, "fast_logits"),
    ],
)
def test_drafts_that_are_none_or_would_change_the_output_are_refused(
    given: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ExternalDraftTokensConfig(**given)
    assert caught.value.param == f"external_draft_tokens_config.{param}"
    assert f"external_draft_tokens_config.{param}" in caught.value.message


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="external_draft_tokens_config"):
        GenerationRequest([1], external_draft_tokens_config=[1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"draft_token_ids": []}, "draft_token_ids"),
        ({"draft_token_ids": ["a"]}, "draft_token_ids"),
        ({"draft_token_ids": [-1]}, "draft_token_ids"),
        ({"draft_token_ids": [True]}, "draft_token_ids"),
        ({"draft_token_ids": 7}, "draft_token_ids"),
        ({"draft_token_ids": [1] * (MAX_DRAFT_TOKENS + 1)}, "draft_token_ids"),
        ({"prediction": 7}, "prediction"),
        ({"prediction": "x" * ((1 << 24) + 1)}, "prediction"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(options: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(b"", Submission("x", options=options))
    assert caught.value.param == param


@pytest.mark.parametrize("value", [-1, MAX_DRAFT_TOKENS + 1, True, 1.5])
def test_a_number_of_guesses_out_of_bounds_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(speculative_num_draft_tokens=value).validate()
    assert caught.value.param == "speculative_num_draft_tokens"
