"""Logprobs and raw logits of a prompt, and raw logits of the output: each position once, whatever happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.wire.format import pack_ids
from runtime.wire.messages import TokenizedRequest
from runtime.wire.plan import BatchPlan
from scheduler_proc.core.samples import SampledLogits
from tests.harness.scheduler.scheduler_parts import SETTING, message, request, run_until_idle, running
from tests.harness.scheduler.scheduler_parts import manager as make_manager
from tests.harness.simulation.fake_sampling import NUM_TOP, VOCAB_SIZE
from tests.harness.simulation.sim_judge import check_prompt_outputs, judge
from tests.harness.simulation.sim_reference import Spec
from tests.harness.simulation.sim_system import MAX_LOGITS_BYTES, System

PROMPT = [i % 90 for i in range(40)]
BOTH = {"prompt_logprobs": 2, "return_context_logits": True}


def spec_of(sent: TokenizedRequest) -> Spec:
    num_prompt = len(sent.input_ids) // 4
    assert sent.sampling.max_tokens is not None
    return Spec(sent, frozenset(), num_prompt + sent.sampling.max_tokens)


def check(system: System, *sent: TokenizedRequest) -> None:
    """Every one is complete and right."""
    for each in sent:
        assert judge(spec_of(each), system.detokenizer) == "length"


def start(system: System, *messages: Any) -> None:
    for item in messages:
        assert system.inbox.send(item)
    system.step()


# -- logprobs of the prompt --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [3, 7, 16, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prompt_in_chunks_of_any_size_gives_each_position_once(
    depth: int, budget: int, page_size: int
) -> None:
    with running(depth=depth, budget=budget, page_size=page_size) as system:
        requests = [
            message(1, PROMPT, sampling={"prompt_logprobs": NUM_TOP, "logprobs": 1}),
            message(2, PROMPT, sampling={"return_context_logits": True}),
            message(3, PROMPT[:9], sampling=BOTH | {"return_generation_logits": True}),
            message(4, [5], sampling=BOTH),
            message(5, [5, 6], sampling={"prompt_logprobs": 0}),
        ]
        run_until_idle(system, *requests)
        check(system, *requests)
        assert len(system.detokenizer.prompt_logprobs[requests[0].handle]) == len(PROMPT) - 1
        assert len(system.detokenizer.logits[requests[1].handle, "context_logits"]) == len(PROMPT)


def test_a_prompt_of_one_token_has_no_logprobs_and_is_a_plain_request() -> None:
    with running() as system:
        start(system, message(1, [5], max_tokens=9, sampling={"prompt_logprobs": 1}))
        (req,) = system.rows.running_requests()
        assert req.features == ()
        run_until_idle(system)


def test_positions_that_are_wanted_are_computed_although_they_are_cached() -> None:
    with running() as system:
        plain = message(1, PROMPT)
        run_until_idle(system, plain)
        wanting = message(2, PROMPT, sampling={"prompt_logprobs": 1})
        num_computed = system.executor.num_computed
        run_until_idle(system, wanting)
        assert system.executor.num_computed - num_computed == len(PROMPT) + 3
        assert system.detokenizer.closed[wanting.handle].cached_tokens == 0
        check(system, plain, wanting)


@pytest.mark.parametrize(
    ("start", "num_computed", "num_wanted"), [(0, 40, 39), (1, 40, 38), (30, 12, 9), (38, 4, 1), (39, 4, 0)]
)
@pytest.mark.parametrize("budget", [5, 64])
def test_only_positions_from_the_wanted_one_on_are_computed(
    start: int, num_computed: int, num_wanted: int, budget: int
) -> None:
    """start: the position of the last token without a logprob. What is before it may come from the cache."""
    with running(budget=budget) as system:
        run_until_idle(system, message(1, PROMPT))
        num_before = system.executor.num_computed
        counted: list[int] = []
        launch = system.executor.launch

        def count_and_launch(plan: BatchPlan) -> Any:
            counted.extend(len(each.targets) // 4 for each in plan.prompt_positions)
            return launch(plan)

        system.executor.launch = count_and_launch  # type: ignore[method-assign]
        sampling = {"prompt_logprobs": 1, "prompt_logprobs_start": start}
        wanting = message(2, PROMPT, sampling=sampling)
        run_until_idle(system, wanting)
        assert system.executor.num_computed - num_before == num_computed + 3
        # The last position of a prompt goes with the others: its row of logits is there for the first token.
        assert sum(counted) in (num_wanted, num_wanted + 1)
        assert len(system.detokenizer.prompt_logprobs[wanting.handle]) == num_wanted
        check(system, wanting)


@pytest.mark.parametrize("num_delivered", [0, 4, 19])
def test_a_resumed_request_counts_from_where_it_was_to_begin(num_delivered: int) -> None:
    with running(budget=16) as system:
        run_until_idle(system, message(1, PROMPT))
        sampling = {"prompt_logprobs": 1, "prompt_logprobs_start": 20}
        resumed = message(2, PROMPT, attempt=1, num_prompt_logprobs=num_delivered, sampling=sampling)
        run_until_idle(system, resumed)
        check(system, resumed)
        assert len(system.detokenizer.prompt_logprobs[resumed.handle]) == 19 - num_delivered


def test_what_was_computed_for_its_logprobs_serves_others() -> None:
    with running() as system:
        wanting = message(1, PROMPT, sampling={"prompt_logprobs": 1})
        run_until_idle(system, wanting)
        plain = message(2, PROMPT)
        run_until_idle(system, plain)
        assert system.detokenizer.closed[plain.handle].cached_tokens == 36
        check(system, wanting, plain)


def test_who_must_compute_a_page_does_not_wait_for_another_who_does() -> None:
    with running(budget=256) as system:
        requests = [message(i, PROMPT, sampling={"prompt_logprobs": 1}) for i in range(3)]
        start(system, *requests, message(9, PROMPT))
        assert system.rows.num_running == 3, "all but the one that may use their pages"
        run_until_idle(system)
        check(system, *requests)
        assert system.kv.cache.num_pages == 10, "the pages of equal prompts are one copy"


# -- retraction and resume ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_steps", "num_done"), [(1, 6), (2, 12), (3, 16), (4, 22)])
def test_a_retracted_request_goes_on_with_the_first_position_that_is_missing(
    num_steps: int, num_done: int
) -> None:
    with running(budget=6, page_size=16, num_pages=16) as system:
        wanting = message(1, PROMPT, sampling=BOTH)
        start(system, wanting)
        for _ in range(num_steps - 1):
            system.step()
        (req,) = system.rows.running_requests()
        assert len(system.detokenizer.prompt_logprobs[wanting.handle]) == num_done == req.wanted_from
        system.lifecycle.retract(req)
        assert system.kv.match(req).num_pages == num_done // 16
        run_until_idle(system)
        check(system, wanting)


def test_with_everything_delivered_a_retracted_request_uses_the_cache() -> None:
    with running() as system:
        wanting = message(1, PROMPT, max_tokens=9, sampling=BOTH)
        start(system, wanting)
        (req,) = system.rows.running_requests()
        system.lifecycle.retract(req)
        num_computed = system.executor.num_computed
        run_until_idle(system)
        assert system.executor.num_computed - num_computed == 41 - 40 + 8 - 1
        check(system, wanting)


@pytest.mark.parametrize("num_delivered", [0, 1, 17, 38, 39])
@pytest.mark.parametrize("sampling", [{"prompt_logprobs": 1}, BOTH])
def test_a_resumed_request_gets_the_logprobs_that_its_last_attempt_did_not(
    num_delivered: int, sampling: dict[str, Any]
) -> None:
    with running(budget=16) as system:
        run_until_idle(system, message(1, PROMPT))
        resumed = message(2, PROMPT, attempt=1, num_prompt_logprobs=num_delivered, sampling=sampling)
        run_until_idle(system, resumed)
        check(system, resumed)
        want_from = 0 if "return_context_logits" in sampling else num_delivered if num_delivered < 39 else 36
        assert system.detokenizer.closed[resumed.handle].cached_tokens == min(want_from // 4 * 4, 36)


@pytest.mark.parametrize("num_delivered", [0, 20])
def test_output_without_all_logprobs_of_the_prompt_still_gets_them(num_delivered: int) -> None:
    """No client of ours comes to this; one that miscounts is served nevertheless."""
    with running(depth=2) as system:
        whole = message(1, PROMPT, max_tokens=9)
        run_until_idle(system, whole)
        have = system.detokenizer.tokens[whole.handle][:5]
        resumed = message(
            *(2, PROMPT, 9),
            attempt=1,
            output_ids=pack_ids(have),
            num_prompt_logprobs=num_delivered,
            sampling=BOTH,
        )
        run_until_idle(system, resumed)
        check(system, resumed)
        assert (resumed.handle, "context_logits") not in system.detokenizer.logits


def test_an_aborted_request_gets_nothing_more_of_its_prompt() -> None:
    with running(budget=8, depth=2) as system:
        wanting = message(1, PROMPT, sampling=BOTH, deadline_s=system.now + 0.035)
        run_until_idle(system, wanting)
        assert system.detokenizer.closed[wanting.handle].reason == "timeout"
        assert 0 < len(system.detokenizer.prompt_logprobs[wanting.handle]) < len(PROMPT) - 1
        check_prompt_outputs(spec_of(wanting), system.detokenizer, is_complete=False)


# -- the cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted_from", "num_pages"), [(0, 0), (3, 0), (4, 1), (11, 2), (100, 4)])
def test_a_match_ends_before_the_first_position_that_is_wanted(wanted_from: int, num_pages: int) -> None:
    kv = make_manager()
    tokens = list(range(20))
    first, second = request(kv, 1, tokens), request(kv, 2, tokens, wanted_from=wanted_from)
    prefix = kv.match(first)
    kv.cache.lock(prefix.node)
    kv.seat(first, prefix, prefix.num_left)
    kv.rows.kv_len[first.row] = 20
    kv.publish_prefill(first)
    assert kv.match(second).num_pages == num_pages
    assert kv.match_len(second) == 4 * num_pages
    kv.check()


# -- raw logits of the output ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_raw_logits_of_the_output_are_as_many_as_its_tokens(depth: int) -> None:
    with running(depth=depth) as system:
        plain = message(1, PROMPT, max_tokens=20)
        run_until_idle(system, plain)
        output = system.detokenizer.tokens[plain.handle]
        stop = {"stop_token_ids": (output[7],), "return_generation_logits": True}
        asking = message(2, PROMPT, max_tokens=20, sampling=stop)
        run_until_idle(system, asking)
        tokens = system.detokenizer.tokens[asking.handle]
        rows = system.detokenizer.logits[asking.handle, "generation_logits"]
        assert [start for start, _ in rows] == list(range(len(tokens)))
        assert judge(spec_of(asking), system.detokenizer) == "stop"
        assert (plain.handle, "generation_logits") not in system.detokenizer.logits


def test_raw_logits_are_cut_without_a_copy() -> None:
    data = np.arange(6, dtype=np.float32).reshape(3, 2)
    logits = SampledLogits(5, 3, 2, data.data)
    assert logits.upto(8) is logits
    assert logits.upto(5) is None
    kept = logits.upto(7)
    assert kept is not None
    assert (kept.start, kept.num_positions) == (5, 2)
    assert bytes(kept.frame) == data[:2].tobytes()
    assert np.shares_memory(np.frombuffer(kept.frame, np.float32), data)


# -- limits ------------------------------------------------------------------------------------------------


def refusal(sampling: dict[str, Any], prompt: list[int] = PROMPT, max_tokens: int = 4, **limits: Any) -> Any:
    with running() as system:
        intake = system.scheduler.intake
        changed = {
            name: getattr(intake.maker.limits, name) for name in intake.maker.limits.__slots__
        } | limits
        intake.maker.limits = type(intake.maker.limits)(**changed)
        asking = message(1, prompt, max_tokens, sampling=sampling)
        run_until_idle(system, asking)
        assert system.detokenizer.tokens[asking.handle] == []
        error = system.detokenizer.closed[asking.handle].error
        assert error is not None
        assert (error.status, error.code) == (400, "invalid_value")
        return error


@pytest.mark.parametrize("which", ["context", "generation"])
def test_raw_logits_that_the_server_does_not_allow_are_refused_by_name(which: str) -> None:
    limits: dict[str, Any] = {f"gather_{which}_logits": False}
    error = refusal({f"return_{which}_logits": True}, **limits)
    assert error.param == f"return_{which}_logits"
    assert f"--gather-{which}-logits" in error.message


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"return_context_logits": True}, "return_context_logits"),
        ({"return_generation_logits": True}, "return_generation_logits"),
    ],
)
def test_more_raw_logits_than_allowed_are_refused_by_name(sampling: dict[str, Any], param: str) -> None:
    error = refusal(sampling, max_tokens=40, max_logits_bytes=39 * VOCAB_SIZE * 4)
    assert error.param == param
    assert "--max-logits-bytes" in error.message


def test_raw_logits_of_prompt_and_output_count_together() -> None:
    both = {"return_context_logits": True, "return_generation_logits": True}
    error = refusal(both, max_tokens=5, max_logits_bytes=44 * VOCAB_SIZE * 4)
    assert error.param == "return_generation_logits"
    with running() as system:
        fitting = message(1, PROMPT, 5, sampling=both)
        run_until_idle(system, fitting)
        check(system, fitting)


def test_output_that_cannot_be_reached_is_not_counted() -> None:
    """max_tokens beyond the context does not make logits that will never be."""
    with running() as system:
        assert (SETTING.max_len - len(PROMPT)) * VOCAB_SIZE * 4 <= MAX_LOGITS_BYTES
        endless = message(1, PROMPT, 1 << 20, sampling={"return_generation_logits": True})
        run_until_idle(system, endless)
        assert system.detokenizer.closed[endless.handle].reason == "length"
