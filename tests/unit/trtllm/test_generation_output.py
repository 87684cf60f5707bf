"""GenerationOutput: a sequence as it was when the output was taken, put together when somebody asks."""

from __future__ import annotations

import copy
import dataclasses
import random

import numpy as np
import pytest

from carousel.client.core.mailbox import Mailbox, TensorPart
from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.submission import Submission
from carousel.client.core.state.request_state import RequestState
from carousel.client.core.state.sequence_state import SequenceState
from carousel.trtllm.generation_output import GenerationOutput
from carousel.trtllm.generation_request import GenerationRequest
from carousel.trtllm.generation_result import GenerationResult
from carousel.trtllm.responses import response_of
from carousel.trtllm.result_mailbox import ResultMailbox
from runtime.wire.format import pack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import Finish, SequenceOutput, TensorEntry, Usage
from runtime.wire.perf_metrics import KvCacheMetrics, RequestPerfMetrics, TimingMetrics
from runtime.wire.sampling_params import SamplingParams

HANDLE = make_handle(1, 1)
PROMPT = [1, 2, 3]


class NoExecutor:
    def abort_request(self, request_id: int) -> None:
        raise AssertionError("nothing is to be aborted")


def result_of(**sampling: object) -> tuple[GenerationResult, ResultMailbox]:
    params = SamplingParams(seed=1, logprobs=0, return_generation_logits=True, **sampling)  # type: ignore[arg-type]
    request = GenerationRequest(PROMPT, params, streaming=True)
    mailbox = ResultMailbox()
    state = RequestState(build_request(HANDLE, Submission(PROMPT, params, True)), params, Mailbox().put)
    return GenerationResult(request, state, mailbox, NoExecutor()), mailbox


def put(mailbox: ResultMailbox, start: int, text: str, *, is_end: bool = False) -> None:
    """Put as many tokens as characters, from number `start` on, with their logprobs and logits."""
    numbers = np.arange(start, start + len(text), dtype=np.float32)
    rows = np.repeat(numbers[:, None], 4, axis=1)
    if text:
        entry = TensorEntry(HANDLE, "generation_logits", "float32", rows.shape, start)
        mailbox.put(TensorPart(entry, rows.tobytes()))
    finish = Finish("length", Usage(3, start + len(text))) if is_end else None
    ids = pack_ids(list(range(start, start + len(text))))
    mailbox.put(SequenceOutput(HANDLE, text, ids, numbers.tobytes(), b"", b"", finish))


def taken(result: GenerationResult) -> GenerationOutput:
    output = result.take_output()
    assert output is not None
    return output


def test_every_output_stays_as_it_was_whatever_comes_later() -> None:
    rng = random.Random(0)
    result, mailbox = result_of()
    text, outputs = "", []
    for number in range(60):
        new = "".join(rng.choices("abc", k=rng.randrange(1, 4)))
        put(mailbox, len(text), new, is_end=number == 59)
        text += new
        outputs.append((taken(result), text, new))
        if rng.random() < 0.3:
            assert result.outputs[0].text == text
    rng.shuffle(outputs)
    for output, whole, new in outputs:
        assert (output.text, output.text_diff) == (whole, new)
        assert output.token_ids == list(range(len(whole)))
        assert output.token_ids_diff == output.token_ids[len(whole) - len(new) :]
        assert [each.token_id for each in output.logprobs] == output.token_ids
        assert output.logprobs_diff == output.logprobs[len(whole) - len(new) :]
        assert output.generation_logits is not None
        assert output.generation_logits[:, 0].tolist() == output.token_ids
        assert (output.finish_reason == "length") is (len(whole) == len(text))


def test_taking_what_is_new_puts_nothing_together() -> None:
    result, mailbox = result_of()
    for number in range(3):
        put(mailbox, number, "a")
        output = taken(result)
        assert (output.text_diff, output.token_ids_diff) == ("a", [number])
        for name in ("text", "token_ids", "logprobs", "generation_logits"):
            with pytest.raises(AttributeError):
                object.__getattribute__(output, name)


def test_what_was_put_together_is_kept() -> None:
    result, mailbox = result_of()
    put(mailbox, 0, "ab")
    output = taken(result)
    for name in ("text", "token_ids", "logprobs", "generation_logits"):
        assert getattr(output, name) is getattr(output, name)


def test_it_compares_and_copies_and_prints_as_the_data_that_it_is() -> None:
    result, mailbox = result_of()
    put(mailbox, 0, "ab", is_end=True)
    first, second = result.result(), result.result()
    assert first == second
    assert "text='ab'" in repr(first)
    assert copy.copy(first) == first
    assert dataclasses.asdict(first)["token_ids"] == [0, 1]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = first.no_such_thing
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.text = "other"  # type: ignore[misc]


def test_nothing_new_at_the_end_is_an_empty_difference() -> None:
    result, mailbox = result_of()
    put(mailbox, 0, "ab")
    taken(result)
    put(mailbox, 2, "", is_end=True)
    last = taken(result)
    assert (last.text, last.text_diff, last.token_ids_diff, last.logprobs_diff) == ("ab", "", [], [])
    assert result.is_exhausted


def test_without_logits_there_are_none() -> None:
    result, mailbox = result_of()
    mailbox.put(SequenceOutput(HANDLE, "a", pack_ids([0])))
    assert taken(result).generation_logits is None


def test_text_from_any_character_on_is_the_end_of_the_text() -> None:
    params = SamplingParams(seed=1)
    request = build_request(HANDLE, Submission(PROMPT, params, True))
    for is_read in (False, True):
        sequence = SequenceState(request, 0, wants_logprobs=False)
        for piece in ("ab", "", "cde", "f"):
            sequence.receive(SequenceOutput(HANDLE, piece))
        assert sequence.num_chars == 6
        if is_read:
            assert sequence.text == "abcdef"
        assert [sequence.text_from(start) for start in range(8)] == ["abcdef"[start:] for start in range(8)]


def test_a_result_has_the_times_of_its_request_with_its_end() -> None:
    metrics = RequestPerfMetrics(TimingMetrics(1.0, 2.0, 3.0, 4.0), KvCacheMetrics(3, 1, 2, 1), 5, 9)
    params = SamplingParams(seed=1, return_perf_metrics=True)
    request = GenerationRequest([1, 2], params, streaming=True)
    mailbox = ResultMailbox()
    state = RequestState(build_request(HANDLE, Submission([1, 2], params, True)), params, Mailbox().put)
    assert state.request.sampling.return_perf_metrics
    result = GenerationResult(request, state, mailbox, NoExecutor())
    mailbox.put(SequenceOutput(HANDLE, "a", b"\1\0\0\0"))
    begun = result.take_output()
    mailbox.put(SequenceOutput(HANDLE, finish=Finish("length", Usage(2, 1), perf_metrics=metrics)))
    ended = result.take_output()
    assert begun is not None
    assert ended is not None
    assert begun.request_perf_metrics is None
    assert ended.request_perf_metrics == metrics
    assert state.completion().outputs[0].request_perf_metrics == metrics
    assert response_of(request, ended, is_final=True).result.request_perf_metrics == metrics
