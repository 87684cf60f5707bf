"""RequestState: what comes back of n sequences, folded into deltas and completions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from carousel.client.core.logprobs import UNKNOWN_ID, TokenLogprob
from carousel.client.core.mailbox import Mailbox, TensorPart
from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.submission import Submission
from carousel.client.core.state.request_state import RequestState
from runtime.base.errors import InvalidRequest, Overloaded, RequestError, RingClosed
from runtime.wire.format import pack_ids
from runtime.wire.handle import make_handle, sibling
from runtime.wire.messages import ErrorInfo, Finish, SequenceOutput, TensorEntry, Usage
from runtime.wire.sampling_params import SamplingParams
from tests.harness.cases import for_each

NUMBER = 1 << 33


def state_of(prompt: Any = "x", **sampling: Any) -> RequestState:
    asked = SamplingParams(**sampling)
    return RequestState(
        build_request(make_handle(7, NUMBER), Submission(prompt, asked)), asked, Mailbox().put
    )


def out(state: RequestState, index: int, text: str, **fields: Any) -> SequenceOutput:
    fields.setdefault("token_ids", pack_ids([ord(character) for character in text]))
    return SequenceOutput(sibling(state.request.handle, index), text, **fields)


def end(num_tokens: int = 1, reason: Any = "stop", cached: int = 0, **fields: Any) -> Finish:
    return Finish(reason, Usage(5, num_tokens, cached), **fields)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def test_each_sequence_with_news_gives_one_delta_in_the_order_of_its_news() -> None:
    state = state_of(n=3)
    deltas = state.receive([out(state, 2, "a"), out(state, 0, "b"), out(state, 2, "c")])
    assert [(delta.index, delta.text, delta.token_ids) for delta in deltas] == [
        (2, "ac", [97, 99]),
        (0, "b", [98]),
    ]
    assert not state.ended


def test_the_length_of_the_prompt_is_kept_where_news_pile_up() -> None:
    state = state_of(n=2)
    first = state.receive([out(state, 0, "a", num_prompt_tokens=5), out(state, 0, "b"), out(state, 1, "c")])
    assert [delta.num_prompt_tokens for delta in first] == [5, 0]


def test_a_request_ends_with_its_last_sequence_and_its_usage_counts_the_prompt_once() -> None:
    state = state_of(n=2)
    assert state.number == NUMBER
    (first,) = state.receive([out(state, 1, "bb", finish=end(2, "length", cached=4))])
    assert (first.finish_reason, first.usage) == ("length", Usage(5, 2, 4))
    assert not state.ended
    state.receive([out(state, 0, "a", finish=end(1, cached=3, matched="."))])
    assert state.ended
    completion = state.completion()
    assert completion.usage == Usage(5, 3, 3)
    assert [each.text for each in completion.outputs] == ["a", "bb"]
    assert [each.finish_reason for each in completion.outputs] == ["stop", "length"]
    assert (completion.text, completion.matched_stop) == ("a", ".")


def test_the_deltas_of_random_pieces_add_up_to_the_completion() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        num_sequences = draw.randint(1, 4)
        state = state_of(n=num_sequences)
        texts = ["".join(draw.choices("abcdef", k=draw.randint(0, 9))) for _ in range(num_sequences)]
        news = [
            out(state, index, character)
            for character, index in sorted(
                ((character, index) for index, text in enumerate(texts) for character in text),
                key=lambda _: draw.random(),
            )
        ]
        # Shuffling has changed the order within a sequence: what was sent is what counts.
        sent = ["".join(each.text for each in news if each.handle[13] == i) for i in range(num_sequences)]
        news += [out(state, index, "", finish=end(len(texts[index]))) for index in range(num_sequences)]
        got = [""] * num_sequences
        while news:
            count = draw.randint(1, 5)
            for delta in state.receive(news[:count]):
                got[delta.index] += delta.text
            del news[:count]
        assert got == sent, f"seed {seed}"
        completion = state.completion()
        assert [each.text for each in completion.outputs] == sent, f"seed {seed}"
        assert [each.token_ids for each in completion.outputs] == [[ord(c) for c in text] for text in sent]


@for_each("reason", ["stop", "length", "abort", "timeout"])
def test_every_finish_reason_keeps_what_there_is(reason: str) -> None:
    state = state_of()
    (delta,) = state.receive([out(state, 0, "ab", finish=end(2, reason))])
    assert delta.finish_reason == reason
    assert (state.completion().finish_reason, state.completion().text) == (reason, "ab")


def test_best_of_keeps_the_likeliest_best_first_with_new_numbers_and_counts_them_all() -> None:
    state = state_of(n=2, best_of=4)
    assert state.request.sampling.n == 4
    scores = [-3.0, -1.0, -9.0, -2.0]
    for index, score in enumerate(scores):
        assert state.outputs() == []
        finish = end(2, cumulative_logprob=score)
        state.receive([out(state, index, str(index) * 2, logprobs=floats(score, 0), finish=finish)])
    completion = state.completion()
    assert [(each.index, each.text, each.cumulative_logprob) for each in completion.outputs] == [
        (0, "11", -1.0),
        (1, "33", -2.0),
    ]
    assert completion.usage.completion_tokens == 8
    assert completion.logprobs == []


def test_best_of_prefers_anything_generated_over_what_ended_before_its_first_token() -> None:
    state = state_of(n=1, best_of=2)
    state.receive([out(state, 0, "", finish=end(0, "timeout", cumulative_logprob=0.0))])
    state.receive([out(state, 1, "a", finish=end(1, cumulative_logprob=-8.0))])
    assert state.completion().text == "a"


def test_of_equally_likely_sequences_the_first_generated_wins() -> None:
    state = state_of(n=1, best_of=3)
    for index in (2, 1, 0):
        state.receive([out(state, index, str(index), finish=end(cumulative_logprob=-1.0))])
    assert state.completion().text == "0"


def test_logprobs_that_were_asked_for_are_shown_with_best_of_too() -> None:
    state = state_of(n=1, best_of=2, logprobs=1)
    for index, score in enumerate((-5.0, -1.0)):
        news = out(
            state,
            index,
            "a",
            logprobs=floats(score),
            top_ids=pack_ids([7]),
            top_logprobs=floats(-0.5),
            finish=end(cumulative_logprob=score),
        )
        state.receive([news])
    assert state.completion().logprobs == [TokenLogprob(97, -1.0, ((7, -0.5),))]


def test_prompt_logprobs_begin_with_none_and_come_once() -> None:
    state = state_of([10, 11, 12, 13], prompt_logprobs=1)
    (first,) = state.receive(
        [
            out(
                state,
                0,
                "",
                prompt_logprobs=floats(-1.0, -2.0),
                prompt_ranks=pack_ids([3, 200]),
                prompt_top_ids=pack_ids([5, 6]),
                prompt_top_logprobs=floats(-0.5, -0.25),
            )
        ]
    )
    tops = {"prompt_top_ids": pack_ids([7]), "prompt_top_logprobs": floats(-0.125)}
    tops["prompt_ranks"] = pack_ids([4])
    (last,) = state.receive([out(state, 0, "a", prompt_logprobs=floats(-3.0), finish=end(), **tops)])
    assert first.prompt_logprobs == [
        None,
        TokenLogprob(11, -1.0, ((5, -0.5),), 3),
        TokenLogprob(12, -2.0, ((6, -0.25),), 200),
    ]
    assert last.prompt_logprobs == [TokenLogprob(13, -3.0, ((7, -0.125),), 4)]
    assert state.completion().prompt_logprobs == first.prompt_logprobs + last.prompt_logprobs


def test_prompt_logprobs_from_a_later_token_on_begin_with_none_for_each_before() -> None:
    state = state_of([10, 11, 12, 13], prompt_logprobs=1, prompt_logprobs_start=2)
    state.receive([out(state, 0, "a", prompt_logprobs=floats(-3.0), finish=end())])
    assert state.completion().prompt_logprobs == [None, None, None, TokenLogprob(13, -3.0)]
    none = state_of([10, 11, 12, 13, 14], prompt_logprobs=1, prompt_logprobs_start=7)
    none.receive([out(none, 0, "a", finish=end())])
    assert none.completion().prompt_logprobs == [None] * 5


def test_prompt_logprobs_of_a_text_have_no_ids_and_those_of_one_token_are_none() -> None:
    text = state_of("abc", prompt_logprobs=0)
    text.receive([out(text, 0, "a", prompt_logprobs=floats(-1.0), finish=end())])
    assert text.completion().prompt_logprobs == [None, TokenLogprob(UNKNOWN_ID, -1.0)]
    one = state_of([5], prompt_logprobs=0)
    one.receive([out(one, 0, "a", finish=end())])
    assert one.completion().prompt_logprobs == [None]
    unasked = state_of([5, 6])
    unasked.receive([out(unasked, 0, "a", finish=end())])
    assert unasked.completion().prompt_logprobs == []


def rows(state: RequestState, name: Any, index: int, start: int, values: np.ndarray) -> TensorPart:
    entry = TensorEntry(sibling(state.request.handle, index), name, "float32", values.shape, start)
    return TensorPart(entry, memoryview(values.tobytes()))


def test_rows_of_logits_are_put_together_and_belong_to_the_caller() -> None:
    state = state_of(n=2, return_context_logits=True, return_generation_logits=True)
    context = np.arange(12, dtype=np.float32).reshape(4, 3)
    generated = [np.full((2, 3), index, np.float32) for index in range(2)]
    parts = [
        rows(state, "context_logits", 0, 0, context[:3]),
        rows(state, "generation_logits", 1, 0, generated[1]),
        rows(state, "context_logits", 0, 3, context[3:]),
        rows(state, "generation_logits", 0, 0, generated[0]),
    ]
    assert state.receive(parts) == []
    state.receive([out(state, index, "ab", finish=end(2)) for index in range(2)])
    completion = state.completion()
    assert completion.context_logits is not None
    np.testing.assert_array_equal(completion.context_logits, context)
    for got, wanted in zip(completion.outputs, generated, strict=True):
        assert got.generation_logits is not None
        np.testing.assert_array_equal(got.generation_logits, wanted)
        got.generation_logits[0, 0] = 5.0


def test_no_logits_are_none() -> None:
    state = state_of()
    state.receive([out(state, 0, "a", finish=end())])
    assert state.completion().context_logits is None
    assert state.completion().outputs[0].generation_logits is None


def test_rows_behind_a_gap_fail_the_request() -> None:
    state = state_of(return_context_logits=True)
    values = np.zeros((2, 3), np.float32)
    state.receive([rows(state, "context_logits", 0, 0, values)])
    state.receive([rows(state, "context_logits", 0, 3, values)])
    with pytest.raises(RequestError, match="rows from"):
        state.check()


def test_rows_that_a_further_attempt_brings_again_are_passed_over() -> None:
    state = state_of(return_context_logits=True)
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    for start, stop in ((0, 2), (0, 1), (1, 3), (0, 4)):
        state.receive([rows(state, "context_logits", 0, start, values[start:stop])])
    state.receive([out(state, 0, "a", finish=end())])
    logits = state.completion().context_logits
    assert logits is not None
    assert np.array_equal(logits, values)


def test_rows_of_another_size_than_was_said_fail_the_request() -> None:
    state = state_of(return_context_logits=True)
    part = rows(state, "context_logits", 0, 0, np.zeros((2, 3), np.float32))
    state.receive([part._replace(data=bytes(part.data)[:-4])])
    with pytest.raises(RequestError, match="size"):
        state.check()


def test_an_error_takes_nothing_away_from_what_came_with_it() -> None:
    state = state_of(n=2)
    failed = Finish("error", Usage(5, 0), error=ErrorInfo("no", "bad", "top_p", 400))
    deltas = state.receive([out(state, 1, "a", finish=failed), out(state, 0, "b")])
    assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas] == [
        (1, "a", None),
        (0, "b", None),
    ]
    with pytest.raises(InvalidRequest, match="no") as caught:
        state.check()
    assert caught.value.param == "top_p"
    assert [sequence.text for sequence in state.sequences] == ["b", "a"]


def test_the_end_of_the_connection_is_raised_after_what_came_before_it() -> None:
    state = state_of()
    (delta,) = state.receive([out(state, 0, "b"), RingClosed("gone")])
    assert delta.text == state.text == "b"
    with pytest.raises(RingClosed, match="gone"):
        state.check()


@pytest.mark.parametrize(("hint", "seconds"), [(0.25, 0.25), (0.0, 1.0)])
def test_a_refusal_says_when_to_try_again(hint: float, seconds: float) -> None:
    state = state_of()
    refused = Finish("error", Usage(0, 0), error=ErrorInfo("full", "overloaded", None, 503, hint))
    assert state.receive([out(state, 0, "", finish=refused)]) == [], "a refusal has no delta"
    with pytest.raises(Overloaded) as caught:
        state.check()
    assert caught.value.retry_after_s == seconds


def test_text_is_the_same_whether_it_is_looked_at_meanwhile_or_not() -> None:
    looked, unlooked = state_of(), state_of()
    for character in "hello":
        for state in (looked, unlooked):
            state.receive([out(state, 0, character)])
        assert looked.text == "hello"[: len(looked.token_ids)]
    assert unlooked.text == "hello"
