"""Judge of a sequence's output, by the reference: tokens, logprobs, logits and its end."""

from __future__ import annotations

from runtime.wire.format import TOKEN_BYTES, unpack_ids
from runtime.wire.messages import Closed
from tests.harness.simulation.fake_sampling import (
    RAISES,
    RAISES_AT,
    TAP,
    fake_logits,
    fake_logprobs,
    prompt_hash,
    seen,
)
from tests.harness.simulation.fakes import BAD_ADAPTER
from tests.harness.simulation.sim_detokenizer import FakeDetokenizer, Logprobs
from tests.harness.simulation.sim_grammar import REFUSED
from tests.harness.simulation.sim_reference import Spec, context_of, prompt_hashes, reference

GRAMMAR_ERRORS = ("invalid_grammar", "grammar_error")


def judge(spec: Spec, detokenizer: FakeDetokenizer) -> str:
    """Return what became of the sequence: a reason, or the code of an error. Raises AssertionError."""
    closed = detokenizer.closed[spec.handle]
    want, hashes, reason = reference(spec)
    num_prompt = len(spec.message.input_ids) // TOKEN_BYTES
    given = spec.start[num_prompt:] or unpack_ids(spec.message.output_ids).tolist()
    have = given + detokenizer.tokens[spec.handle]
    if spec.aborted_before_sent:
        assert (closed.reason, have) == ("abort", []), "it was aborted before it came"
    elif closed.reason in ("stop", "length"):
        adapter = spec.message.adapter
        assert adapter is None or adapter.name != BAD_ADAPTER or have == given, "computed without its adapter"
        has_raised = any(call.name == RAISES for call in spec.message.processors) and len(want) > RAISES_AT
        assert not has_raised or spec.start, "a processor raised, and nobody was told"
        assert have == want, f"output differs at {first_difference(have, want)} of {len(want)}"
        assert closed.reason == ("stop" if reason == "complete" else reason)
        assert closed.stop_token == (want[-1] if reason == "stop" else -1)
    else:
        assert have == want[: len(have)], "output of an ended sequence"
        check_early_end(spec, closed, detokenizer)
    assert 0 <= closed.cached_tokens <= num_prompt
    check_logprobs(spec, detokenizer.logprobs[spec.handle], given, have, hashes)
    check_generation_logits(spec, detokenizer, given, have, hashes)
    check_additional_outputs(spec, detokenizer, given, have)
    check_prompt_outputs(spec, detokenizer, is_complete=len(have) > 0)
    check_perf_metrics(spec, closed, len(detokenizer.tokens[spec.handle]))
    return closed.error.code if closed.error is not None else closed.reason


def check_early_end(spec: Spec, closed: Closed, detokenizer: FakeDetokenizer) -> None:
    if closed.reason == "timeout":
        assert 0.0 < spec.message.deadline_s <= detokenizer.closed_at[spec.handle], (
            "ended before its deadline"
        )
    elif closed.reason == "error":
        assert closed.error is not None
        if closed.error.code in ("overloaded", "queue_timeout", "rate_limit_exceeded"):
            assert closed.error.retry_after_s > 0.0
            assert not detokenizer.tokens[spec.handle]
        elif closed.error.code == "invalid_adapter":
            assert spec.message.adapter is not None
            assert spec.message.adapter.name == BAD_ADAPTER
            assert not detokenizer.tokens[spec.handle]
        elif closed.error.param == "priority":
            assert (spec.message.tenant, closed.error.status) != ("", 400)
            assert spec.message.priority > 0
            assert not detokenizer.tokens[spec.handle]
        elif spec.message.guide is not None and closed.error.code == "invalid_guide":
            assert spec.message.guide.text == REFUSED
            assert not detokenizer.tokens[spec.handle]
        elif closed.error.code == "grammar_unsatisfiable":
            want, _, reason = reference(spec)
            given = unpack_ids(spec.message.output_ids).tolist()
            assert reason == "unsatisfiable"
            assert given + detokenizer.tokens[spec.handle] == want
        elif closed.error.code == "logits_processor_failed":
            assert any(call.name == RAISES for call in spec.message.processors)
            given = unpack_ids(spec.message.output_ids).tolist() + detokenizer.tokens[spec.handle]
            assert given == reference(spec)[0][:RAISES_AT]
        else:
            assert "grammar" in spec.traits
            assert closed.error.code in GRAMMAR_ERRORS
    else:
        assert spec.ended_from_outside


def check_logprobs(
    spec: Spec, got: list[Logprobs], given: list[int], have: list[int], hashes: list[int]
) -> None:
    k = spec.message.sampling.logprobs
    if k is None:
        assert not got
        return
    first = len(given)
    want = [expected(hashes[i], have[i], k) for i in range(first, len(have))]
    assert got == want, "another token's logprobs"


def check_generation_logits(
    spec: Spec, detokenizer: FakeDetokenizer, given: list[int], have: list[int], hashes: list[int]
) -> None:
    got = detokenizer.logits.get((spec.handle, "generation_logits"), [])
    if not spec.message.sampling.return_generation_logits:
        assert not got
        return
    want = [(i, fake_logits(hashes[i]).tobytes()) for i in range(len(given), len(have))]
    assert got == want, "logits of another token, or not as many as tokens"


def check_additional_outputs(
    spec: Spec, detokenizer: FakeDetokenizer, given: list[int], have: list[int]
) -> None:
    """The row of each token before one that came, and those of the prompt if they are wanted, once each."""
    sampling, message = spec.message.sampling, spec.message
    got = detokenizer.logits.get((spec.handle, f"generation_{TAP}"), [])
    context = detokenizer.logits.get((spec.handle, f"context_{TAP}"), [])
    if not sampling.additional_outputs:
        assert not got
        assert not context
        return
    prompt = unpack_ids(message.input_ids).tolist()
    whole = context_of(spec, [*prompt, *have])
    hashes = [prompt_hash(seen(whole[: at + 1], spec.window)) for at in range(len(whole))]
    rows = [fake_logits(h).tobytes() for h in hashes]
    numbers = range(max(0, len(given) - 1), len(have) - 1) if len(have) > len(given) else range(0)
    assert got == [(at, rows[len(prompt) + at]) for at in numbers], "rows of other tokens"
    wants_context = sampling.gather_context and not message.output_ids
    assert context == list(enumerate(rows[: len(prompt) if wants_context else 0]))[: len(context)]
    assert not wants_context or not have or len(context) == len(prompt), "rows of the prompt are missing"


def check_prompt_outputs(spec: Spec, detokenizer: FakeDetokenizer, *, is_complete: bool) -> None:
    """Each position once, in order; all of them before the first token."""
    message, k = spec.message, spec.message.sampling.prompt_logprobs
    start = message.sampling.prompt_logprobs_start + message.num_prompt_logprobs
    logprobs = detokenizer.prompt_logprobs[spec.handle]
    logits = detokenizer.logits.get((spec.handle, "context_logits"), [])
    hashes, prompt = prompt_hashes(spec), unpack_ids(message.input_ids).tolist()
    want_logprobs: list[Logprobs] = []
    if k is not None:
        of_targets = [expected(h, target, k) for h, target in zip(hashes, prompt[1:], strict=False)]
        want_logprobs = of_targets[start:]
    want_logits = []
    if message.sampling.return_context_logits and not message.output_ids:
        want_logits = [(i, fake_logits(h).tobytes()) for i, h in enumerate(hashes)]
    if not is_complete:
        want_logprobs = want_logprobs[: len(logprobs)]
        want_logits = want_logits[: len(logits)]
    assert logprobs == want_logprobs, "logprobs of the prompt"
    assert logits == want_logits, "logits of the prompt"
    if want_logprobs or want_logits:
        assert detokenizer.closed[spec.handle].cached_tokens <= start, "not bypassed"


def check_perf_metrics(spec: Spec, closed: Closed, num_new: int) -> None:
    """num_new: tokens that came with this attempt."""
    metrics = closed.perf_metrics
    if not spec.message.sampling.return_perf_metrics:
        assert metrics is None
        return
    if metrics is None:  # refused where it arrived
        assert not num_new
        assert closed.reason in ("abort", "timeout", "error")
        return
    timing, pages = metrics.timing_metrics, metrics.kv_cache_metrics
    times = (
        timing.arrival_time,
        timing.first_scheduled_time,
        timing.first_token_time,
        timing.last_token_time,
    )
    known = [each for each in times if each is not None]
    assert known == sorted(known), "what was later came before"
    assert (timing.last_token_time is not None) is (num_new > 0)
    num_drawn = num_new - len(spec.message.draft_ids) // TOKEN_BYTES  # its drafts may all come with the first
    assert (metrics.last_iter or 0) - (metrics.first_iter or 0) >= num_drawn // 8 - 1, (
        "more than a step gives"
    )
    num_prompt = len(spec.message.input_ids) // TOKEN_BYTES
    assert pages.num_reused_blocks + pages.num_missed_blocks <= num_prompt


def expected(h: int, token: int, k: int) -> Logprobs:
    chosen, top_ids, top = fake_logprobs(h, token)
    return chosen, top_ids[:k], top[:k]


def first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
