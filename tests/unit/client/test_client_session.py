"""Recovery of a client by events alone: a session and a ring's state are told what happens and when. The time
is the test's; there is no thread and no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from carousel.client.core.mailbox import Mailbox
from carousel.client.core.request.submission import RequestOptions, Submission
from carousel.client.core.ring_state import (
    PING_S,
    TICK_S,
    Command,
    ReplaceLane,
    Restart,
    RetryLink,
    RingState,
    SendPing,
)
from carousel.client.core.session import Session
from carousel.client.core.state.request_state import RequestState
from runtime.base.errors import CarouselError, RequestError, RingClosed
from runtime.wire.format import SILENCE_S, pack_ids
from runtime.wire.handle import MAX_ATTEMPT, attempt_of, with_attempt
from runtime.wire.messages import (
    AbortRequest,
    ControlRequest,
    Finish,
    GenerateRequest,
    OutputBatch,
    Resume,
    SequenceOutput,
    ToTokenizer,
    Usage,
)
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessState, RingStatus

CLIENT_IDS = (7, 8)
RING_TIMEOUT_S = 60.0


class Events:
    """Events of one client of a ring of two tokenizers and two detokenizers, and what its
    session and the ring's state command in answer.
    """

    has_room = True
    max_waiting = 100
    client_ids: tuple[int, ...] = CLIENT_IDS
    run_dir: Path | None = None

    def __init__(self, **about: Any) -> None:
        self.now = 1000.0
        self.sent: list[ToTokenizer] = []
        self.commands: list[Command] = []
        self.opened: Future[None] = Future()
        self.error: CarouselError | None = None
        self.epochs = {"engine": 1, "tokenizer": 1, "detokenizer": 1}
        self.ready = dict.fromkeys(self.epochs, True)
        self.ring = RingState("here", **{"is_remote": False, "ring_timeout_s": RING_TIMEOUT_S} | about)
        self.session: Session[Mailbox] = Session(self._connect, Mailbox, clock=lambda: self.now)
        self.ring.begin(len(CLIENT_IDS), self.now)
        self.see()

    def _connect(
        self, on_message: Callable[[Any], None], on_restart: Any, on_closed: Any, **_: Any
    ) -> Events:
        self.on_message, self.on_restart, self.on_closed = on_message, on_restart, on_closed
        return self

    # -- what a session commands -----------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self.ring.generation

    def client_of(self, number: int) -> int:
        return CLIENT_IDS[self.lane_of(number)]

    def lane_of(self, number: int) -> int:
        return number % 2

    def tokenizer_of(self, number: int) -> int:
        return number % 2

    def check_usable(self) -> None:
        if self.error is not None:
            raise self.error

    def submit(self, message: ToTokenizer, number: int) -> None:
        self.check_usable()
        self.sent.append(message)

    resubmit = submit

    def abort(self, handles: tuple[bytes, ...], number: int) -> None:
        self.submit(AbortRequest(handles), number)

    def abort_all(self) -> None:
        """Nobody closes this one."""

    close = abort_all

    # -- what happens ----------------------------------------------------------------------------------------

    def see(self) -> None:
        self._note(self.ring.see(self.status))

    @property
    def status(self) -> RingStatus:
        engine, *others = (ProcessState(self.epochs[role], self.ready[role]) for role in self.epochs)
        tokenizer, detokenizer = others
        steady = ProcessState(1)
        return RingStatus("ready", 0, 0, 0, engine, (tokenizer, steady), (detokenizer, steady))

    def lose(self, role: str) -> None:
        self.ready[role] = False
        self.see()

    def replace(self, role: str) -> None:
        self.epochs[role] += 1
        self.ready[role] = True
        self.see()

    def pass_time(self, seconds: float, *, heard: bool = True, lost: Sequence[int] = ()) -> None:
        """Tick as a thread does. `heard`: the detokenizers ping."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + TICK_S)
            if heard:
                for lane in range(2):
                    if self.ring.is_open(lane):
                        self._note(self.ring.hear(lane, self.now))
            self.tick(lost=lost)

    def tick(self, why_gone: str = "", *, lost: Sequence[int] = (), are_links_lost: bool = False) -> None:
        try:
            self._note(self.ring.tick(self.now, why_gone, self.status, lost))
            self.ring.check(self.now, why_gone, are_links_lost=are_links_lost)
        except RingClosed as error:
            self.error = error
            self.on_closed(error)

    def _note(self, commands: Sequence[Command]) -> None:
        self.commands += commands
        for command in commands:
            if isinstance(command, Restart):
                self.on_restart(command)

    def of_kind(self, kind: type[Command]) -> list[Command]:
        return [command for command in self.commands if isinstance(command, kind)]

    # -- a caller and the other end --------------------------------------------------------------------------

    def ask(self, time_limit: float | None = None) -> tuple[RequestState, Mailbox]:
        options = RequestOptions(time_limit=time_limit)
        return self.session.open_request(Submission("x", SamplingParams(seed=3), True, options))

    def answer(self, handle: bytes, text: str, *, is_end: bool = False, **fields: Any) -> None:
        finish = Finish("stop", Usage(1, 3)) if is_end else None
        output = SequenceOutput(handle, text, pack_ids(list(map(ord, text))), finish=finish, **fields)
        self.on_message(OutputBatch((output,)))

    def last_request(self) -> GenerateRequest:
        return [message for message in self.sent if isinstance(message, GenerateRequest)][-1]


def test_a_lost_engine_is_waited_for_and_the_request_goes_on_where_it_was() -> None:
    events = Events()
    state, mailbox = events.ask(time_limit=30)
    first = events.last_request()
    assert (attempt_of(first.handle), first.time_limit_ms, first.resume) == (0, 30_000, None)
    events.answer(first.handle, "ab")
    events.lose("engine")
    assert not events.ring.is_whole(events.now)
    events.pass_time(4.0)
    assert len(events.sent) == 1, "nothing is made again before the engine is ready"
    events.replace("engine")
    assert events.ring.is_whole(events.now)
    again = events.last_request()
    assert attempt_of(again.handle) == 1
    assert again.resume == Resume(pack_ids([97, 98]), num_chars=2)
    assert again.time_limit_ms == 26_000, "the time that it waited counts"
    assert again.sampling.seed == 3
    events.answer(first.handle, "lost words")
    events.answer(again.handle, "c", is_end=True)
    state.receive(mailbox.take_now())
    assert (state.text, state.ended, state.error) == ("abc", True, None)
    assert events.session.num_in_flight == 0


def test_a_sampled_sequence_tells_of_its_attempts() -> None:
    events, traceparent = Events(), f"00-{'a' * 32}-{'b' * 16}-01"
    options = RequestOptions(traceparent=traceparent)
    events.session.open_request(Submission("x", SamplingParams(n=2, seed=3), True, options))
    first = events.last_request()
    assert first.trace is not None
    assert first.trace.stamps == ()
    times = []
    for _ in range(2):
        events.lose("engine")
        events.pass_time(4.0)
        events.replace("engine")
        times.append(events.now)
    again = [each for each in events.sent if isinstance(each, GenerateRequest)][-2:]
    for each in again:
        assert each.trace is not None
        assert each.trace.context == first.trace.context
        expected = [("attempt", at, number + 1) for number, at in enumerate(times)]
        assert [(stamp.name, stamp.at_s, stamp.value) for stamp in each.trace.stamps] == expected


@pytest.mark.parametrize("lane", [0, 1])
def test_a_question_is_asked_again_when_who_carries_it_is_replaced(lane: int) -> None:
    events = Events()
    with events.session.asking("timeline", lane, label="mine"):
        assert [each.client for each in events.sent if isinstance(each, ControlRequest)] == [CLIENT_IDS[lane]]
        events.lose("tokenizer")
        events.replace("tokenizer")
        num_asked = sum(isinstance(each, ControlRequest) for each in events.sent)
        assert num_asked == (2 if lane == 0 else 1), "the first tokenizer was replaced"


def test_an_engine_that_never_comes_back_ends_all_requests_when_the_time_is_over() -> None:
    events = Events()
    state, mailbox = events.ask()
    events.lose("engine")
    events.pass_time(RING_TIMEOUT_S - 1)
    assert mailbox.take_now() == []
    events.pass_time(2.0)
    state.receive(mailbox.take_now())
    with pytest.raises(RingClosed, match="has lacked a process, or one that answers, for 60 s"):
        state.check()
    with pytest.raises(RingClosed):
        events.ask()


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_tokenizer_loses_only_those_of_its_own_of_which_nothing_has_come(has_begun: bool) -> None:
    events = Events()
    events.ask()  # number 0, by the tokenizer that is lost
    mine = events.last_request()
    events.ask()
    if has_begun:
        events.answer(mine.handle, "a")
    events.replace("tokenizer")
    made_again = events.sent[2:]
    assert [attempt_of(message.handle) for message in made_again] == [1] * (not has_begun)  # type: ignore[union-attr]


def test_a_caller_who_leaves_while_the_tokenizer_is_gone_is_told_of_again() -> None:
    events = Events()
    state, _ = events.ask()
    events.lose("tokenizer")
    events.session.forget(state.number)
    events.replace("tokenizer")
    aborts = [message for message in events.sent if isinstance(message, AbortRequest)]
    assert aborts == [AbortRequest((state.request.handle,))] * 2


def test_nothing_is_kept_of_a_request_that_ends_while_its_caller_leaves() -> None:
    """Before, the session kept its handle for ever."""
    events = Events()
    state, mailbox = events.ask()
    put = mailbox.put

    def end_meanwhile(item: Any) -> None:
        events.answer(state.request.handle, "a", is_end=True)
        put(item)

    state.put = end_meanwhile
    events.session.forget(state.number)
    assert events.session._requests.left() == []
    assert events.session.num_in_flight == 0


@pytest.mark.parametrize("has_sent", [False, True])
def test_a_request_whose_caller_is_interrupted_while_it_is_sent_is_aborted(has_sent: bool) -> None:
    """Ctrl-C interrupts it. Before, the request ran to its end, though nobody could read it."""
    events = Events()
    submit = events.submit

    def interrupt(message: ToTokenizer, number: int) -> None:
        if has_sent:
            submit(message, number)
        events.submit = submit  # type: ignore[method-assign]
        raise KeyboardInterrupt

    events.submit = interrupt  # type: ignore[method-assign]
    options = RequestOptions(label="mine")
    with pytest.raises(KeyboardInterrupt):
        events.session.open_request(Submission("x", SamplingParams(), True, options))
    assert events.session.num_in_flight == 0
    assert [type(message) for message in events.sent] == [GenerateRequest] * has_sent + [AbortRequest]
    events.session.open_request(Submission("x", SamplingParams(), True, options))


def test_a_detokenizer_that_is_silent_is_connected_to_anew_and_what_it_had_goes_on() -> None:
    events = Events()
    state, mailbox = events.ask()
    events.answer(state.request.handle, "a")
    events.pass_time(SILENCE_S - 1, heard=False)
    assert events.of_kind(ReplaceLane) == []
    events.pass_time(2.0, heard=False)
    assert events.of_kind(ReplaceLane) == [ReplaceLane(0), ReplaceLane(1)]
    assert not events.ring.is_whole(events.now)
    for lane in range(2):
        events._note(events.ring.hear(lane, events.now))
    assert events.ring.is_whole(events.now)
    again = events.last_request()
    assert (attempt_of(again.handle), again.resume) == (1, Resume(pack_ids([97]), num_chars=1))
    events.answer(again.handle, "b", is_end=True)
    state.receive(mailbox.take_now())
    assert state.text == "ab"


def test_a_client_that_was_stopped_itself_blames_nobody_and_connects_anew() -> None:
    events = Events()
    events.pass_time(1.0)
    events.now += 10 * RING_TIMEOUT_S
    events.tick(why_gone="its launcher is dead")
    assert events.of_kind(ReplaceLane) == [ReplaceLane(0), ReplaceLane(1)]
    assert events.error is None, "a moment is given to those that were stopped with it"
    events.now += PING_S
    events.tick(why_gone="its launcher is dead")
    assert str(events.error) == "the runtime at here is gone: its launcher is dead"


def test_over_tcp_the_ring_is_gone_when_all_connections_are() -> None:
    events = Events(is_remote=True)
    events.replace("detokenizer")
    assert events.of_kind(ReplaceLane) == [], "its connection says it sooner"
    events.now += TICK_S
    events.tick(lost=[0], are_links_lost=True)
    assert events.error is None, "one detokenizer is still there"
    events.now += TICK_S
    events.tick(lost=[1], are_links_lost=True)
    assert str(events.error) == "the connection to the runtime at here was lost"


def test_over_tcp_what_a_lost_or_refused_connection_swallowed_is_sent_again_when_it_stands() -> None:
    events = Events(is_remote=True)
    events.ask()  # number 0, by the tokenizer whose connection breaks
    events.ask()
    assert events.ring.see_links([0], []) == []
    assert not events.ring.is_whole(events.now)
    events.pass_time(2 * PING_S)
    assert events.of_kind(RetryLink) == [RetryLink(0)] * 2
    assert len(events.sent) == 2, "nothing is made again while it does not stand"
    events._note(events.ring.see_links([], [0, 1]))
    assert events.ring.is_whole(events.now)
    assert [attempt_of(message.handle) for message in events.sent] == [0, 0, 1]  # type: ignore[union-attr]
    events.replace("tokenizer")
    assert len(events.sent) == 3, "its connection has said it already"
    events._note(events.ring.see_links([1], [0, 1]))
    assert len(events.sent) == 4, "one that stands again before anybody looked was lost all the same"


def test_a_tokenizer_that_never_takes_our_key_is_named_when_the_time_is_over() -> None:
    events = Events(is_remote=True)
    events.ring.see_links([1], [0])
    events.pass_time(RING_TIMEOUT_S + 1)
    assert str(events.error).endswith("; out of reach, or refusing this client's key: tokenizer 1")


def test_each_detokenizer_is_pinged_once_a_while() -> None:
    events = Events()
    events.pass_time(3 * PING_S)
    assert len(events.of_kind(SendPing)) == 2 * 3


def test_a_stream_outlasts_many_more_changes_of_weights_than_anybody_makes() -> None:
    events = Events()
    state, mailbox = events.ask()
    for number in range(300):
        events.answer(events.last_request().handle, "abc"[number % 3])
        events.replace("engine")
    events.answer(events.last_request().handle, "d", is_end=True)
    state.receive(mailbox.take_now())
    assert (state.text, state.is_complete) == ("abc" * 100 + "d", True)


def test_a_request_is_made_as_often_as_its_handle_can_say() -> None:
    events = Events()
    state, mailbox = events.ask()
    state.sequences[0].handle = with_attempt(state.sequences[0].handle, MAX_ATTEMPT - 1)
    events.replace("engine")
    assert attempt_of(events.last_request().handle) == MAX_ATTEMPT
    assert mailbox.take_now() == []
    events.replace("engine")
    state.receive(mailbox.take_now())
    with pytest.raises(RequestError, match=f"was replaced {MAX_ATTEMPT + 1} times under the request"):
        state.check()
