"""tokenizer_proc: prompts of all forms become ids; a request for n sequences is encoded once and let through,
refused and aborted as a whole; its times and its words reach those who need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import IntArray, pack_ids, unpack_ids
from runtime.wire.handle import MAX_INDEX, make_handle
from runtime.wire.messages import AbortRequest, ChatMessage, RequestFailed, Resume, StreamOpen
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessStatus
from tests.harness.ring.launched import SLACK, wait_until
from tests.harness.ring.tokenizer_ring import (
    CLIENT,
    LONG_TEXT,
    GatedTokenizer,
    Ring,
    handle,
    passed_on,
    refusal,
    request,
)
from tokenizer_proc.receipt import MAX_AGE_S, Receipt
from tokenizer_proc.validation import QueueBound

IDS = pack_ids([5, 6, 7])


def indexes(count: int, seq: int = 0, first: int = 0) -> list[bytes]:
    return [make_handle(CLIENT, seq, first + index) for index in range(count)]


# -- prompts of all forms ------------------------------------------------------------------------------------


def test_text_ids_and_messages_become_token_ids(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.send(
        request(0, text="def f(x):"),
        request(1, input_ids=pack_ids([5, 6, 7])),
        request(2, messages=(ChatMessage("user", "def f(x):"),)),
    )
    ring.loop.turn()
    prompts = {m.handle: unpack_ids(m.input_ids).tolist() for m in ring.scheduler.drain()}
    assert demo.decode(prompts[handle(0)]) == "def f(x):"
    assert prompts[handle(1)] == [5, 6, 7]
    assert prompts[handle(2)] == [0, *prompts[handle(0)]]
    assert ring.refusals() == []


def test_prompts_of_all_forms_are_cut_where_they_are_encoded(demo: Tokenizer) -> None:
    """A text that could not fit is cut, too, not refused before it is encoded."""
    text = "def f(x):\n    return x\n" * 30
    ids = demo.encode_batch([text])[0].tolist()
    chat_ids = demo.encode_batch([text], add_special_tokens=False)[0].tolist()
    sampling = SamplingParams(seed=1, max_tokens=4, truncate_prompt_tokens=5)
    ring = Ring(demo, context_length=16)
    sent = passed_on(
        ring,
        request(0, text=text, sampling=sampling),
        request(1, input_ids=pack_ids(ids), sampling=sampling),
        request(2, text=text, sampling=msgspec.structs.replace(sampling, truncate_prompt_tokens=-1)),
        request(3, text=text * 200, sampling=sampling),
    )
    ring.wait_for_long()
    ring.loop.turn()
    sent += ring.scheduler.drain()
    cut = {each.handle: unpack_ids(each.input_ids).tolist() for each in sent}
    assert cut == {handle(0): ids[-5:], handle(1): ids[-5:], handle(2): ids[-12:], handle(3): ids[-5:]}
    opened = msgspec.msgpack.decode(sent[0].stream_open, type=StreamOpen)
    assert opened.num_prompt_tokens == 5
    messages = (ChatMessage("user", text),)
    (chat,) = passed_on(ring, request(4, messages=messages, sampling=sampling))
    assert len(unpack_ids(chat.input_ids)) == 5
    assert set(unpack_ids(chat.input_ids).tolist()) <= {0, *chat_ids}
    assert ring.refusals() == []


def test_the_first_conversation_after_a_restart_holds_up_nobody(demo: Tokenizer) -> None:
    """It imports a library, which took the loop a second: /ready named the tokenizer, and all waited."""

    class Closed(GatedTokenizer):
        @property
        def is_template_open(self) -> bool:
            return self.gate.is_set()

        def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
            assert self.gate.wait(10)
            return super().apply_chat_template(messages, **options)

    closed = Closed(demo)
    ring = Ring(closed)
    hello = (ChatMessage("user", "def f(x):"),)
    odd = request(1, messages=hello, template_kwargs=msgspec.msgpack.encode({"tokenize": True}))
    ring.send(request(0, messages=hello), odd, request(2, text="short"))
    ring.loop.turn()
    assert [m.handle for m in ring.scheduler.drain()] == [handle(2)]
    assert ring.loop.num_encoding == 2
    closed.gate.set()
    ring.wait_for_long()
    ring.send(request(3, messages=hello))
    ring.loop.turn()
    prompts = {m.handle: unpack_ids(m.input_ids).tolist() for m in ring.scheduler.drain()}
    assert prompts.keys() == {handle(0), handle(3)}
    assert prompts[handle(0)] == prompts[handle(3)]
    (refused,) = ring.refusals()
    assert (refused.handle, refused.error.param) == (handle(1), "chat_template_kwargs")
    assert ring.loop.num_encoding == 0
    ring.loop.close()


# -- sequences -----------------------------------------------------------------------------------------------


def test_a_prompt_is_encoded_once_for_all_of_its_sequences(demo: Tokenizer) -> None:
    encoded: list[str] = []

    class Counts(GatedTokenizer):
        def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
            encoded.extend(texts)
            return super().encode_batch(texts, add_special_tokens=add_special_tokens)

    sent = passed_on(Ring(Counts(demo)), request(0, text="def f", sampling=SamplingParams(seed=1, n=3)))
    assert encoded == ["def f"]
    assert [message.handle for message in sent] == indexes(3)
    assert len({message.input_ids for message in sent}) == 1
    opened = [msgspec.msgpack.decode(message.stream_open, type=StreamOpen) for message in sent]
    assert [stream.handle for stream in opened] == indexes(3)


def test_every_sequence_draws_with_a_seed_of_its_own_and_is_one(demo: Tokenizer) -> None:
    largest = (1 << 63) - 1
    sent = passed_on(Ring(demo), request(0, input_ids=IDS, sampling=SamplingParams(seed=largest, n=3)))
    assert [message.sampling.seed for message in sent] == [largest, 0, 1]
    assert all(message.sampling.n == 1 for message in sent)


def test_only_the_first_sequence_brings_what_belongs_to_the_prompt(demo: Tokenizer) -> None:
    sampling = SamplingParams(
        seed=1, n=2, prompt_logprobs=2, logprobs=1, return_context_logits=True, return_generation_logits=True
    )
    first, second = (
        message.sampling for message in passed_on(Ring(demo), request(0, input_ids=IDS, sampling=sampling))
    )
    assert (first.prompt_logprobs, first.return_context_logits) == (2, True)
    assert (second.prompt_logprobs, second.return_context_logits) == (None, False)
    assert (second.logprobs, second.return_generation_logits) == (1, True)


@pytest.mark.parametrize("bad", [{"text": ""}, {"input_ids": pack_ids([4096])}, {"messages": ()}])
def test_a_refusal_answers_every_sequence(demo: Tokenizer, bad: dict[str, Any]) -> None:
    ring = Ring(demo)
    assert passed_on(ring, request(0, sampling=SamplingParams(seed=1, n=3), **bad)) == []
    refused = ring.refusals()
    assert [failed.handle for failed in refused] == indexes(3)
    assert len({failed.error for failed in refused}) == 1


def test_a_refusal_goes_to_the_detokenizer_of_its_client(demo: Tokenizer) -> None:
    ring = Ring(demo, num_detokenizers=3)
    handles = [make_handle(client, 0) for client in (30, 31, 32, 33)]
    ring.send(*(request(0, handle=one, text="") for one in handles))
    ring.loop.turn()
    received = [[failed.handle for failed in channel.drain()] for channel in ring.detokenizers]
    assert received == [[handles[0], handles[3]], [handles[1]], [handles[2]]]


def test_a_detokenizer_without_room_stops_the_reading_and_loses_nothing(demo: Tokenizer) -> None:
    ring = Ring(demo, num_detokenizers=2)
    ring.detokenizers[1]._capacity = 1
    bad = [request(seq, handle=make_handle(31, seq), input_ids=b"") for seq in range(3)]
    ring.send(*bad, request(9, input_ids=IDS))
    ring.loop.turn()
    assert ring.loop.is_busy
    assert ring.scheduler.drain() == []
    refused = []
    while ring.loop.is_busy:
        refused += ring.refusals()
        ring.loop.turn()
    assert [failed.handle for failed in refused + ring.refusals()] == [one.handle for one in bad]
    assert [message.handle for message in ring.scheduler.drain()] == [handle(9)]


def test_admission_counts_sequences_and_lets_all_of_a_request_through_or_none(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.status = ProcessStatus(num_running=100, num_waiting=95)
    sent = passed_on(
        ring,
        request(0, input_ids=IDS, sampling=SamplingParams(seed=1, n=3)),
        request(1, input_ids=IDS, sampling=SamplingParams(seed=1, n=3)),
        request(2, text="a", sampling=SamplingParams(seed=1, n=2)),
        request(3, input_ids=IDS),
    )
    assert [message.handle for message in sent] == indexes(3, 0) + indexes(2, 2)
    refused = ring.refusals()
    assert [failed.handle for failed in refused] == [*indexes(3, 1), handle(3)]
    assert {failed.error.code for failed in refused} == {"overloaded"}
    assert all(failed.error.retry_after_s > 0 for failed in refused)
    assert ring.loop.num_sent == 5


def test_what_other_tokenizers_let_through_takes_its_place(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.num_sent_elsewhere = 198
    sampling = SamplingParams(seed=1, n=2)
    assert len(passed_on(ring, request(0, input_ids=IDS, sampling=sampling))) == 2
    assert refusal(ring, request(1, input_ids=IDS)).error.code == "overloaded"
    ring.status = ProcessStatus(num_received=10)
    assert len(passed_on(ring, request(2, input_ids=IDS))) == 1


def test_more_sequences_than_can_ever_wait_are_refused_for_good(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.loop._admission._bound = QueueBound(max_waiting=2, max_waiting_of_client=2, max_running=2)
    assert passed_on(ring, request(0, input_ids=IDS, sampling=SamplingParams(seed=1, n=5))) == []
    refused = ring.refusals()
    assert len(refused) == 5
    assert {(failed.error.param, failed.error.status) for failed in refused} == {("n", 400)}


@pytest.mark.parametrize(
    ("aborted", "repeated"),
    [([1], [1]), ([2, 0], [0, 2]), ([7], []), (None, [0, 1, 2])],
)
def test_an_abort_finds_each_sequence_of_a_text_that_is_still_being_encoded(
    demo: Tokenizer, aborted: list[int] | None, repeated: list[int]
) -> None:
    gated = GatedTokenizer(demo)
    ring = Ring(gated)
    abort = (
        AbortRequest(client=CLIENT)
        if aborted is None
        else AbortRequest(tuple(make_handle(CLIENT, 0, index) for index in aborted))
    )
    ring.send(request(0, text=LONG_TEXT, sampling=SamplingParams(seed=1, n=3)), abort)
    ring.loop.turn()
    assert ring.loop.num_sent == 3
    assert ring.scheduler.drain() == [abort]
    gated.gate.set()
    ring.wait_for_long()
    ring.loop.turn()
    sent = ring.scheduler.drain()
    assert [message.handle for message in sent[:3]] == indexes(3)
    expected = tuple(make_handle(CLIENT, 0, index) for index in repeated)
    assert sent[3:] == ([AbortRequest(expected)] if expected else [])
    assert ring.loop.num_sent == 3
    ring.loop.close()


# -- what does not go together -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"resume": Resume(IDS), "sampling": SamplingParams(seed=1, n=2)}, "resume"),
        ({"sampling": SamplingParams(seed=1, n=2, best_of=2)}, "best_of"),
        ({"handle": make_handle(CLIENT, 0, MAX_INDEX), "sampling": SamplingParams(seed=1, n=2)}, "n"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"template_kwargs": msgspec.msgpack.encode({"a": 1})}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(demo: Tokenizer, fields: dict[str, Any], param: str) -> None:
    ring = Ring(demo)
    assert passed_on(ring, request(0, input_ids=IDS, **fields)) == []
    assert {failed.error.param for failed in ring.refusals()} == {param}


def test_one_sequence_of_several_is_resumed_by_its_own_handle(demo: Tokenizer) -> None:
    own = make_handle(CLIENT, 0, MAX_INDEX, 1)
    resume = Resume(IDS, 3, num_prompt_logprobs=2)
    (message,) = passed_on(Ring(demo), request(0, handle=own, input_ids=IDS, resume=resume))
    assert (message.handle, message.output_ids) == (own, IDS)
    assert message.num_prompt_logprobs == 2


# -- chat templates ------------------------------------------------------------------------------------------

TALK = (ChatMessage("user", "import os"), ChatMessage("assistant", "def f(x):"))


def test_the_final_message_is_continued_where_it_ends(demo: Tokenizer) -> None:
    (message,) = passed_on(
        Ring(demo), request(0, messages=TALK, add_generation_prompt=False, continue_final_message=True)
    )
    text = demo.decode(unpack_ids(message.input_ids).tolist(), skip_special_tokens=False)
    assert text == "<|endoftext|>import os\ndef f(x):"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"template_kwargs": b"\xc1"}, "chat_template_kwargs"),
        ({"template_kwargs": b"\x91" * 1_900}, "chat_template_kwargs"),
        ({"template_kwargs": msgspec.msgpack.encode({1: 2})}, "chat_template_kwargs"),
        ({"template_kwargs": msgspec.msgpack.encode([1])}, "chat_template_kwargs"),
        ({"template_kwargs": msgspec.msgpack.encode({"messages": []})}, "chat_template_kwargs"),
    ],
)
def test_options_that_the_template_cannot_have_are_refused_by_name(
    demo: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    error = refusal(Ring(demo), request(0, messages=TALK, **fields)).error
    assert (error.param, error.status) == (param, 400)


# -- times ---------------------------------------------------------------------------------------------------


def test_a_time_limit_counts_from_receipt(demo: Tokenizer) -> None:
    ring = Ring(demo)
    limited, unlimited = passed_on(
        ring, request(0, input_ids=IDS, time_limit_ms=1500), request(1, input_ids=IDS)
    )
    assert limited.deadline_s == ring.now.monotonic_s + 1.5
    assert unlimited.deadline_s == 0.0


def test_every_request_has_the_time_at_which_it_was_read(demo: Tokenizer) -> None:
    ring = Ring(demo)
    (early,) = passed_on(ring, request(0, input_ids=IDS))
    ring.now = Receipt(ring.now.monotonic_s + 5, ring.now.wall_s + 5)
    (late,) = passed_on(ring, request(1, input_ids=IDS, time_limit_ms=1))
    assert late.arrived_s - early.arrived_s == 5
    assert late.deadline_s == pytest.approx(late.arrived_s + 0.001)


def test_a_request_that_waits_to_be_read_on_keeps_the_time_of_its_receipt(demo: Tokenizer) -> None:
    ring = Ring(demo, scheduler_room=1)
    received = ring.now.monotonic_s
    ring.send(*(request(seq, input_ids=IDS, time_limit_ms=1000) for seq in range(3)))
    ring.loop.turn()
    ring.now = Receipt(received + 60, ring.now.wall_s + 60)
    sent = []
    while ring.loop.is_busy:
        sent += ring.scheduler.drain()
        ring.loop.turn()
    sent += ring.scheduler.drain()
    assert [message.deadline_s for message in sent] == [received + 1.0] * 3
    assert [message.arrived_s for message in sent] == [received] * 3


@pytest.mark.parametrize(
    ("arrival_time", "age_s"),
    [
        (0.0, 0.0),
        (2_000_000_000.0 - 2.5, 2.5),
        (2_000_000_000.0 + 9.0, 0.0),
        (2_000_000_000.0 - 999.0, 999.0),
        (2_000_000_000.0 - MAX_AGE_S - 1, 0.0),
        (12.0, 0.0),
        (float("inf"), 0.0),
        (float("nan"), 0.0),
    ],
)
def test_the_time_of_arrival_is_the_caller_s_unless_its_clock_is_wrong(
    demo: Tokenizer, arrival_time: float, age_s: float
) -> None:
    receipt = Receipt(10_000.0, 2_000_000_000.0)
    assert receipt.arrived_s(arrival_time) == pytest.approx(receipt.monotonic_s - age_s)


def test_an_arrival_from_before_the_machine_started_is_the_receipt() -> None:
    assert Receipt(100.0, 2_000_000_000.0).arrived_s(2_000_000_000.0 - 101.0) == 100.0


# -- long texts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "messages"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(demo: Tokenizer, form: str) -> None:
    class Unused(GatedTokenizer):
        def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
            raise AssertionError("encoded a text that cannot fit")

    ring = Ring(Unused(demo), context_length=4096)
    text = "x" * (8 << 20)
    ring.send(request(0, text=text) if form == "text" else request(0, messages=(ChatMessage("user", text),)))
    refusals: list[RequestFailed] = []

    def is_refused() -> bool:
        ring.loop.turn()
        refusals.extend(ring.refusals())
        return bool(refusals)

    wait_until(is_refused, 10.0 * SLACK, "it is refused")  # a long conversation is written by the thread
    (refused,) = refusals
    assert ring.scheduler.drain() == []
    assert (refused.error.code, refused.error.param) == ("context_length_exceeded", form)
    assert not ring.loop.is_busy


def test_the_longest_text_that_may_fit_is_encoded(demo: Tokenizer) -> None:
    longest = max(demo.vocabulary.values(), key=len)
    assert len(longest) == demo.max_token_chars()
    (token,) = (n for n, spelling in demo.vocabulary.items() if spelling == longest)
    ring = Ring(demo, context_length=17)
    text = demo.decode([token] * 16)
    refused = refusal(ring, request(0, text=text + "x"))
    assert "characters" in refused.error.message
    ring.send(request(1, text=text))
    ring.loop.turn()
    assert all("characters" not in failed.error.message for failed in ring.refusals())
