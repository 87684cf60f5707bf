"""tokenizer_proc.loop: every request goes on or is refused, in order, whatever the others are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from runtime.base.errors import InvalidRequest
from runtime.text.codec import PROMPT_TAIL_TOKENS
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import IntArray, pack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import (
    AbortRequest,
    ChatMessage,
    ControlRequest,
    Resume,
    StreamOpen,
    TokenizedRequest,
)
from runtime.wire.perf_metrics import Stamp, TraceStamps
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessStatus
from tests.harness.ring.launched import SLACK
from tests.harness.ring.tokenizer_ring import (
    CLIENT,
    LONG_TEXT,
    MEDIUM_TEXT,
    GatedTokenizer,
    Ring,
    handle,
    passed_on,
    refusal,
    request,
)
from tokenizer_proc.arrivals import MAX_PIECE_CHARS
from tokenizer_proc.sequences import namespace


def test_the_detokenizer_is_told_all_it_needs_through_the_scheduler(demo: Tokenizer) -> None:
    ring = Ring(demo)
    sampling = SamplingParams(
        seed=1, stop=("END",), min_tokens=3, skip_special_tokens=False, include_stop_str_in_output=True
    )
    resume = Resume(pack_ids([9, 8]), num_chars=4, cumulative_logprob=-1.5)
    ids = list(range(3, 23))
    ring.send(
        request(
            0,
            input_ids=pack_ids(ids),
            sampling=sampling,
            label="mine",
            stream=True,
            priority=7,
            resume=resume,
        )
    )
    ring.loop.turn()
    (message,) = ring.scheduler.drain()
    assert isinstance(message, TokenizedRequest)
    assert message.sampling == sampling
    assert (message.priority, message.output_ids) == (7, pack_ids([9, 8]))
    assert msgspec.msgpack.decode(message.stream_open, type=StreamOpen) == StreamOpen(
        handle=handle(0),
        num_prompt_tokens=20,
        prompt_tail=pack_ids(ids[-PROMPT_TAIL_TOKENS:]),
        label="mine",
        stream=True,
        stop=("END",),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        min_tokens=3,
        resume=resume,
        content=message.content,
    )


def test_a_refusal_reaches_the_detokenizer_and_harms_nobody_else(demo: Tokenizer) -> None:
    ring = Ring(demo, context_length=16)
    ring.send(request(0, text="a"), request(1, text=""), request(2, text="a b " * 30), request(3, text="b"))
    ring.loop.turn()
    assert [m.handle for m in ring.scheduler.drain()] == [handle(0), handle(3)]
    errors = {m.handle: m.error for m in ring.refusals()}
    assert errors[handle(1)].param == "text"
    assert errors[handle(2)].code == "context_length_exceeded"
    assert errors[handle(2)].status == 400


def test_an_overloaded_ring_refuses_before_it_tokenizes() -> None:
    class Unused:
        def max_token_chars(self) -> None:
            return None

        def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[IntArray]:
            raise AssertionError("tokenized a request that was to be refused")

    ring = Ring(Unused())
    ring.status = ProcessStatus(num_running=100, num_waiting=100)
    ring.send(request(0, text="a"))
    ring.loop.turn()
    (refused,) = ring.refusals()
    assert (refused.error.status, refused.error.code) == (503, "overloaded")


def test_a_full_ring_takes_what_is_made_again_and_believes_it_only_after_a_restart(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.status = ProcessStatus(num_running=100, num_waiting=100)
    again = [request(seq, handle=make_handle(CLIENT, seq, attempt=1), text="a") for seq in range(2)]
    assert refusal(ring, again[0]).error.code == "overloaded"
    ring.is_recovering = True
    assert [message.handle for message in passed_on(ring, again[1])] == [again[1].handle]


def test_what_was_let_through_and_has_not_arrived_counts_against_the_queue(demo: Tokenizer) -> None:
    gated = GatedTokenizer(demo)
    ring = Ring(gated)
    ring.status = ProcessStatus(num_running=99, num_waiting=95)  # five may wait, one finds a free row
    ring.send(
        request(0, text=LONG_TEXT),
        request(1, text="a"),
        request(2, input_ids=pack_ids([5])),
        request(3, text=""),  # refused by itself, so it takes nobody's place
        request(4, text="a"),
    )
    ring.loop.turn()
    assert [refused.handle for refused in ring.refusals()] == [handle(3)]
    ring.send(*(request(seq, text="a") for seq in range(5, 9)))
    ring.loop.turn()
    assert [refused.handle for refused in ring.refusals()] == [handle(7), handle(8)]
    ring.status = ProcessStatus(num_running=100, num_waiting=99, num_received=5)
    ring.send(request(9, text="a"))
    ring.loop.turn()
    (refused,) = ring.refusals()
    assert refused.error.code == "overloaded"
    gated.gate.set()
    ring.loop.close()


def test_an_abort_and_a_control_request_never_overtake_a_request(demo: Tokenizer) -> None:
    ring = Ring(demo)
    ring.send(
        request(0, text="a"),
        AbortRequest((handle(0),)),
        request(1, text="b"),
        ControlRequest(CLIENT, 1, "server_info"),
        request(2, text="c"),
    )
    ring.loop.turn()
    kinds = [type(m).__name__ for m in ring.scheduler.drain()]
    assert kinds == [
        "TokenizedRequest",
        "AbortRequest",
        "TokenizedRequest",
        "ControlRequest",
        "TokenizedRequest",
    ]


def test_without_room_ahead_everything_is_kept_and_nothing_new_is_read(demo: Tokenizer) -> None:
    ring = Ring(demo, scheduler_room=2)
    ring.send(*(request(seq, text="a") for seq in range(5)))
    ring.loop.turn()
    ring.send(request(5, text="a"))
    ring.loop.turn()
    assert ring.loop.is_busy
    ring.loop.turn()
    assert len(ring.inbox.drain()) == 1, "read on although there was no room"
    received = []
    while ring.loop.is_busy:
        received += ring.scheduler.drain()
        ring.loop.turn()
    received += ring.scheduler.drain()
    assert [m.handle for m in received] == [handle(seq) for seq in range(5)]


def test_a_turn_encodes_no_more_than_its_share_so_the_heartbeat_goes_on(demo: Tokenizer) -> None:
    ring = Ring(demo)
    text = "x" * (MAX_PIECE_CHARS // 4)
    ring.send(*(request(seq, text=text) for seq in range(12)))
    num_sent = []
    while ring.loop.turn():
        num_sent.append(len(ring.scheduler.drain()))
    num_sent.append(len(ring.scheduler.drain()))
    assert num_sent == [3, 3, 3, 3]


class Templated(Tokenizer):
    """A chat template that makes a short text of everything."""

    is_template_open = True
    refuses = False

    def __init__(self, loaded: Tokenizer) -> None:
        super().__init__(loaded._backend, loaded._open_wrapper)

    def apply_chat_template(self, *_args: Any, **_options: Any) -> str:
        if self.refuses:
            raise InvalidRequest("messages: no", param="messages")
        return "x"


VARIABLES = msgspec.msgpack.encode({"x": "x" * 700})
HELLO = (ChatMessage("user", "x"),)
THOUGHTS = msgspec.msgpack.encode({"reasoning_content": "f" * 3000})


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO, "template_kwargs": VARIABLES},
        {"messages": (ChatMessage("user", "", "n" * 250),) * 12},
        {"messages": (ChatMessage("user", ""),) * 125},
        {"messages": (ChatMessage("assistant", "", "", THOUGHTS),)},
        {"messages": HELLO, "tools": msgspec.json.encode([{"a": "x" * 3000}])},
    ],
)
def test_what_a_chat_template_has_to_read_counts_for_a_turn(
    demo: Tokenizer, fields: dict[str, Any], refuses: bool
) -> None:
    """256 requests with variables of 43 KB, which took the template 0.1 s each, were one turn. Others waited
    for 31 s.
    """
    templated = Templated(demo)
    templated.refuses = refuses
    ring = Ring(templated)
    ring.send(*(request(seq, **fields) for seq in range(8)))
    assert ring.loop.turn(), "all in one turn"
    assert len(ring.refusals() if refuses else ring.scheduler.drain()) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO, "template_kwargs": msgspec.msgpack.encode({"x": "x" * (20 << 10)})},
        {"messages": (ChatMessage("user", "x", "n" * 256),) * 256},
        {"messages": (ChatMessage("user", "x"),) * 4096},
    ],
)
def test_a_conversation_that_takes_its_template_long_is_left_to_a_thread(
    demo: Tokenizer, fields: dict[str, Any]
) -> None:
    ring = Ring(Templated(demo))
    ring.send(request(0, **fields))
    ring.loop.turn()
    assert ring.loop.num_encoding == 1
    ring.loop.close()


def test_few_conversations_are_taken_while_the_template_is_loaded(demo: Tokenizer) -> None:
    """Before, any number was taken. What is beyond MAX_ENCODING_CHARS waits unbegun."""
    opened, own = threading.Event(), (ChatMessage("user", "x" * 60_000),)

    class Loading(Templated):
        is_template_open = False

        def apply_chat_template(self, *_args: Any, **_options: Any) -> str:
            assert opened.wait(5.0 * SLACK)
            self.is_template_open = True
            return "x"

    ring = Ring(Loading(demo))
    ring.send(*(request(seq, messages=own) for seq in range(12)))
    while ring.loop.turn():
        pass
    assert ring.loop.num_encoding == 5
    opened.set()
    assert len(ring.finish()) == 12
    assert not ring.refusals()
    ring.loop.close()


@pytest.mark.parametrize("text", [LONG_TEXT, MEDIUM_TEXT], ids=["long", "medium"])
@pytest.mark.parametrize("abort", [AbortRequest((handle(0),)), AbortRequest(client=CLIENT)])
def test_a_long_text_holds_up_nobody_and_cannot_escape_its_abort(
    demo: Tokenizer, abort: AbortRequest, text: str
) -> None:
    gated = GatedTokenizer(demo, len(text))
    ring = Ring(gated)
    ring.send(request(0, text=text), request(1, text="short"), abort)
    ring.loop.turn()
    assert [type(m) for m in ring.scheduler.drain()] == [TokenizedRequest, AbortRequest]
    assert ring.loop.is_busy
    assert ring.loop.num_encoding == 1
    gated.gate.set()
    ring.wait_for_long()
    ring.loop.turn()
    assert ring.loop.num_encoding == 0
    late = ring.scheduler.drain()
    assert [m.handle for m in late if isinstance(m, TokenizedRequest)] == [handle(0)]
    assert late[-1] == AbortRequest((handle(0),))
    assert not ring.loop.is_busy
    ring.loop.close()


def test_what_one_request_breaks_fails_it_alone_and_is_logged_without_its_text(
    demo: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks:
        def max_token_chars(self) -> None:
            return None

        def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[IntArray]:
            for text in texts:
                if "secret" in text:
                    raise RuntimeError(f"cannot encode {text}")
            return demo.encode_batch(texts, add_special_tokens=add_special_tokens)

    ring = Ring(Breaks())
    ring.send(request(0, text="a"), request(1, text="my secret"), request(2, text="b"))
    with caplog.at_level(logging.DEBUG):
        ring.loop.turn()
    assert [m.handle for m in ring.scheduler.drain()] == [handle(0), handle(2)]
    (refused,) = ring.refusals()
    assert (refused.handle, refused.error.status, refused.error.code) == (handle(1), 500, "internal_error")
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_namespaces_depend_on_salt_and_secret_and_no_salt_shares() -> None:
    secret = b"a" * 32
    assert namespace("", "", secret) == b""
    names = [namespace(tenant, salt, secret) for tenant in ("", "t", "u") for salt in ("", "x", "y")]
    assert len(set(names)) == 9
    assert namespace("", "x", secret) != namespace("", "x", b"b" * 32)
    assert namespace("t", "", secret) != namespace("t", "", b"b" * 32)
    assert namespace("t", "x", secret) == namespace("t", "x", secret)
    # The cache tells tenants apart by the first part.
    assert namespace("t", "x", secret)[:8] == namespace("t", "", secret)
    assert namespace("", "x", secret)[:8] == bytes(8)


def test_a_sampled_request_is_stamped_on_its_way(demo: Tokenizer) -> None:
    ring = Ring(demo)
    context = bytes(range(1, 26))
    trace = TraceStamps(context, (Stamp("attempt", 990.0, 1),))
    sampling = SamplingParams(seed=1, n=2)
    sampled = passed_on(ring, request(1, text="x", sampling=sampling, trace=trace))
    assert len(sampled) == 2
    for each in sampled:
        assert each.trace.context == context
        names = [(stamp.name, stamp.at_s) for stamp in each.trace.stamps]
        assert names == [("attempt", 990.0), ("tokenizer_in", 1000.0), ("tokenizer_out", 1000.0)]
    (plain,) = passed_on(ring, request(2, text="x"))
    assert plain.trace is None


def test_a_search_is_one_sequence_to_the_scheduler_with_n_openings(
    demo: Tokenizer,
) -> None:
    ring = Ring(demo)
    sampling = SamplingParams(seed=1, temperature=0.0, n=3, use_beam_search=True, beam_width=4)
    ring.send(request(0, input_ids=pack_ids([5, 6, 7]), sampling=sampling))
    ring.loop.turn()
    (message,) = ring.scheduler.drain()
    assert message.handle == handle(0)
    assert message.sampling == sampling
    opens = [message.stream_open, *message.more_opens]
    opened = [msgspec.msgpack.decode(raw, type=StreamOpen).handle for raw in opens]
    assert opened == [make_handle(CLIENT, 0, index) for index in range(3)]
    assert ring.loop.num_sent == 1
    assert not message.shows_hypotheses
    for number, asked in ((1, sampling), (2, SamplingParams(seed=1))):
        ring.send(request(number, input_ids=pack_ids([5]), sampling=asked, stream=True))
        ring.loop.turn()
        (message,) = ring.scheduler.drain()
        assert message.shows_hypotheses == (number == 1), "there are hypotheses of a search alone"
