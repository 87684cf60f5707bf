"""Connection: the I/O thread behind a client, and its sockets. Knows messages; knows no result.

    caller ── submit ──► deque ── caller or I/O thread ──► PUSH to each tokenizer
    on_message ◄──────────────────────── I/O thread ◄───── a lane from each detokenizer

Pings pass each second on each lane, both ways.

Callers never wait for a socket: they append to a deque and send what is in it, or wake the thread if the
socket is in use or has no room. The thread alone decides that the ring is gone, and says so exactly once.

While a process of the ring is being replaced nothing is sent; once it is ready `on_restart` says so, and that
comes after everything that the old one had sent.

The number of a request decides its lane, hence the client id in its handles, and its tokenizer, which also
gets all later messages about it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import zmq

from carousel.client.connection.handover import MAX_BYTES, Handover
from carousel.client.connection.lane import Lane, TokenizerOutbox
from carousel.client.connection.target import Target, find_target
from carousel.client.core import ring_state
from carousel.client.core.mailbox import HandedOver
from carousel.client.core.request.request_builder import no_text
from carousel.client.core.ring_state import (
    RING_TIMEOUT_S,
    Command,
    ReplaceLane,
    Restart,
    RetryLink,
    RingState,
)
from runtime.base.errors import CarouselError, InvalidRequest, Overloaded, RingClosed
from runtime.wire.messages import AbortRequest, ControlReply, HelloAck, OutputBatch, ToTokenizer
from runtime.wire.status_page import RingStatus
from runtime.wire.transport import DECODE_ERRORS, HIGH_WATER_MARK, BadFrames, Framed, MessageCodec

logger = logging.getLogger(__name__)

# Messages that callers may have waiting for one tokenizer; each end of the socket holds as many again.
MAX_UNSENT = HIGH_WATER_MARK
FAREWELL_LINGER_MS = 200
JOIN_TIMEOUT_S = 2.0

OnMessage: TypeAlias = Callable[[OutputBatch | ControlReply | Framed | HandedOver], None]


class Connection:
    def __init__(
        self,
        target: Target,
        on_message: OnMessage,
        on_restart: Callable[[Restart], None],
        on_closed: Callable[[CarouselError], None],
        why_abandoned: Callable[[], str],
        *,
        connect_timeout_s: float,
        ring_timeout_s: float = RING_TIMEOUT_S,
    ) -> None:
        """Start the I/O thread. `opened` is resolved once all detokenizers have answered.

        The callbacks are called in the I/O thread. on_closed: called at most once, when the ring is gone or
        refuses the client; a ring that lacks a process for longer than ring_timeout_s counts as gone.
        why_abandoned: asked in each tick; the reason why nobody uses the connection any more, which ends it,
        or "". Raises RingClosed when there is no runtime at `target`.
        """
        self.opened: Future[None] = Future()
        self.error: CarouselError | None = None
        """Reason why the connection has ended; None while it is open."""
        self.max_waiting = 0
        """Maximum number of sequences that may wait in the ring. Like the following attributes, valid once
        `opened` is resolved.
        """
        self.client_ids: tuple[int, ...] = ()
        self._tokenizers: tuple[TokenizerOutbox, ...] = ()
        self._lanes: list[Lane] = []
        self._poller = zmq.Poller()
        self._handover = Handover(self._wake)
        self._is_held = False
        """True while nothing is read, because what was read has not been passed on."""
        self._target = target
        self.run_dir = target.run_dir
        self._watch = target.open_watch()
        self._ring = RingState(target.name, is_remote=target.wants_status, ring_timeout_s=ring_timeout_s)
        self._on_message = on_message
        self._on_restart = on_restart
        self._on_closed = on_closed
        self._why_abandoned = why_abandoned
        self._connect_timeout_s = connect_timeout_s
        self._requests = MessageCodec(ToTokenizer, 0)
        self._bad_frames = BadFrames("client_out")
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant, because a destructor that aborts its request may interrupt a call that holds it.
        self._wake_lock = threading.RLock()
        self._pid = os.getpid()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="carousel-client", daemon=True)
        self._thread.start()

    # -- callers' threads ------------------------------------------------------------------------------------

    def client_of(self, number: int) -> int:
        return self.client_ids[self.lane_of(number)]

    def lane_of(self, number: int) -> int:
        return number % len(self.client_ids)

    def tokenizer_of(self, number: int) -> int:
        return number % len(self._tokenizers)

    @property
    def generation(self) -> int:
        return self._ring.generation

    @property
    def has_room(self) -> bool:
        return all(len(tokenizer.unsent) < MAX_UNSENT for tokenizer in self._tokenizers)

    def check_usable(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)  # with it each call would keep the frames of all before
        if self._stop:
            raise RingClosed("the client is closed")
        if os.getpid() != self._pid:
            raise RingClosed("the client belongs to the process that this one was forked from; make another")

    def submit(self, message: ToTokenizer, number: int) -> None:
        if len(self._tokenizers[self.tokenizer_of(number)].unsent) >= MAX_UNSENT:
            raise Overloaded("the runtime takes requests more slowly than they are made; try again later")
        self._enqueue(message, number)

    def resubmit(self, message: ToTokenizer, number: int) -> None:
        self._enqueue(message, number)

    def abort(self, handles: tuple[bytes, ...], number: int) -> None:
        self.check_usable()
        self._tokenizers[self.tokenizer_of(number)].aborts.extend(handles)
        self._wake()

    def abort_all(self) -> None:
        for client_id in self.client_ids:
            for tokenizer in range(len(self._tokenizers)):
                self._enqueue(AbortRequest(client=client_id), tokenizer)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked process has neither the thread nor those that may hold its locks
        self._stop = True
        self._wake()
        # The collector may have found the client's owner in this very thread, which then ends by itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _enqueue(self, message: ToTokenizer, number: int) -> None:
        frame = self._encode(message)
        self.check_usable()
        tokenizer = self._tokenizers[self.tokenizer_of(number)]
        tokenizer.unsent.add(frame)
        if not tokenizer.send_now():
            self._wake()

    def _encode(self, message: ToTokenizer) -> bytearray:
        """Return the frame of a message. It must be within the receiver's bounds, which build_request checks,
        because a larger one would be dropped there and never answered.
        """
        try:
            frame = self._requests.encode_in_place(message)
        except UnicodeEncodeError as error:
            raise no_text(message, error) from None
        except (TypeError, *DECODE_ERRORS) as error:
            raise InvalidRequest(f"the request cannot be sent: {error}") from None
        limit = self._target.max_frame_bytes
        if len(frame) > limit:
            raise InvalidRequest(f"the request is larger than {limit >> 20} MiB", code="request_too_large")
        return frame

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # -- the I/O thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        try:
            self._context = context
            self._open(context)
            self.opened.set_result(None)
            self._serve()
        except CarouselError as error:
            self._end(error)
        except Exception as error:  # a thread that ends silently would leave every caller waiting
            logger.exception("the connection to the runtime has failed")
            self._end(
                RingClosed(f"the connection to the runtime has failed: {type(error).__name__}: {error}")
            )
        finally:
            for tokenizer in self._tokenizers:
                tokenizer.hold()
            context.destroy(linger=FAREWELL_LINGER_MS)
            self._watch.close()
            # Not by `close`, which may not be called, or may give up waiting for this thread.
            with self._wake_lock:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _end(self, error: CarouselError) -> None:
        self.error = error
        if not self.opened.done():
            self.opened.set_exception(error)
        self._on_closed(error)

    def _open(self, context: zmq.Context[Any]) -> None:
        """Connect to the first detokenizer, and to all others that it names. Raises RingClosed or
        ProtocolMismatch.
        """
        deadline = time.monotonic() + self._connect_timeout_s
        self._ring.see(self._watch.status())  # later replacements are noticed from here on
        first = self._open_lane(context, 0, deadline)
        for index in range(1, first.num_detokenizers):
            self._open_lane(context, index, deadline)
        self._requests = MessageCodec(ToTokenizer, first.epoch)
        tokenizers: list[TokenizerOutbox] = []
        for index in range(first.num_tokenizers):
            address = self._target.tokenizer_in(index, first.num_detokenizers)
            tokenizers.append(TokenizerOutbox(context, self._target, address, self._requests))
        self.client_ids = tuple(lane.client_id for lane in self._lanes)
        self._tokenizers = tuple(tokenizers)
        self.max_waiting = first.max_waiting
        self._ring.begin(len(self._lanes), time.monotonic())
        self._carry_out(self._ring.see(self._watch.status()))

    def _open_lane(self, context: zmq.Context[Any], index: int, deadline: float) -> HelloAck:
        lane = Lane(context, self._target, index, self._bad_frames)
        self._lanes.append(lane)
        self._poller.register(lane.socket, zmq.POLLIN)
        greet_at = time.monotonic() + ring_state.PING_S
        while (now := time.monotonic()) < deadline:
            if self._stop:
                raise RingClosed("the client was closed while it was connecting")
            if lane.socket.poll(int(ring_state.TICK_S * 1000)):
                ack = lane.read_ack()
                if ack is not None:
                    return ack
            if now >= greet_at:  # the first greeting may have died with its receiver
                greet_at = now + ring_state.PING_S
                lane.greet()
            self._ring.check_gone(self._watch.why_gone())
            self._check_wanted()
        raise RingClosed(
            f"the runtime at {self._target.name} has not answered within {self._connect_timeout_s:g} s; "
            f"{self._target.no_answer_hint}"
        )

    def _serve(self) -> None:
        poller, ring = self._poller, self._ring
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stop:
            self._hold(is_held=self._handover.is_full)
            ready = dict(poller.poll(int(ring_state.TICK_S * 1000)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            arrived: list[Any] = []
            num_bytes = 0
            for lane in list(self._lanes):
                if lane.socket in ready:
                    messages, size = self._receive(lane)
                    arrived += messages
                    num_bytes += size
            messages = []  # nothing is kept until the next ones come
            now = time.monotonic()
            if ring.is_due(now):
                self._take_all(arrived)  # before a restart that is seen now
                arrived = []
                self._tick(now)
            is_whole = ring.is_whole(now)
            for tokenizer in self._tokenizers:
                if not is_whole:
                    tokenizer.hold()
                blocked = is_whole and not tokenizer.try_send()
                poller.register(tokenizer.socket, zmq.POLLOUT if blocked else 0)
            # Last, because the threads that this wakes need the interpreter, which the next wait frees.
            self._take_all(arrived)
            arrived = []
            self._note(num_bytes)
        for tokenizer in self._tokenizers:
            tokenizer.try_send()

    def _hold(self, *, is_held: bool) -> None:
        """Read from no lane while `is_held`. The detokenizers keep what they cannot send."""
        if is_held:
            now = time.monotonic()
            for lane in self._lanes:  # nobody is silent whom nobody hears
                if lane.is_open:
                    self._carry_out(self._ring.hear(lane.index, now))
        if is_held != self._is_held:
            self._is_held = is_held
            for lane in self._lanes:
                self._poller.register(lane.socket, 0 if is_held else zmq.POLLIN)

    def _receive(self, lane: Lane) -> tuple[list[Any], int]:
        """Return messages of a lane that have arrived, and their size in bytes."""
        if not lane.is_open:
            if lane.read_ack() is not None:
                self._carry_out(self._ring.hear(lane.index, time.monotonic()))
            return [], 0
        messages, num_bytes = lane.receive()
        if messages:
            self._ring.hear(lane.index, time.monotonic())
        return messages, num_bytes

    def _receive_last(self, lane: Lane) -> None:
        """Take what has come on a lane that is given up: its last messages may say that the ring ends. A
        detokenizer that goes on to send is not read for ever; what it sends later is made again.
        """
        num_bytes = 0
        while num_bytes < MAX_BYTES:
            messages, size = lane.receive()
            if not size:
                break
            self._take_all(messages)
            num_bytes += size
        self._note(num_bytes)

    def _note(self, num_bytes: int) -> None:
        """Count messages that were handed over."""
        note = self._handover.add(num_bytes)
        if note is not None:
            self._on_message(note)

    def _take_all(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if isinstance(message, OutputBatch | ControlReply | Framed):
                self._on_message(message)
            elif isinstance(message, RingStatus):
                self._watch.hear(message)

    def _check_wanted(self) -> None:
        """Abort everything if nobody uses the connection any more, and raise RingClosed, which ends it."""
        reason = self._why_abandoned()
        if reason:
            self.abort_all()
            raise RingClosed(reason)

    def _tick(self, now: float) -> None:
        self._check_wanted()
        watch, ring = self._watch, self._ring
        lost = [lane.index for lane in self._lanes if lane.is_lost]
        self._carry_out(ring.tick(now, watch.why_gone(), watch.status(), lost))
        links = [tokenizer.link for tokenizer in self._tokenizers if tokenizer.link]
        broken = [index for index, link in enumerate(links) if link.forgive()]
        self._carry_out(ring.see_links(broken, [index for index, link in enumerate(links) if link.stands]))
        are_links_lost = bool(links) and all(link.is_lost for link in links)
        ring.check(now, watch.why_gone(), are_links_lost=are_links_lost)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Restart):
                logger.info(
                    "%s %d was replaced or lost touch: what it may have lost is made again",
                    command.role,
                    command.index,
                )
                self._on_restart(command)
            elif isinstance(command, ReplaceLane):
                self._replace_lane(command.index)
            elif isinstance(command, RetryLink):
                self._tokenizers[command.index].retry_link()
            else:
                self._lanes[command.index].ping()

    def _replace_lane(self, index: int) -> None:
        old = self._lanes[index]
        if old.is_open:
            self._receive_last(old)
        self._poller.register(old.socket, 0)
        old.close()
        lane = Lane(self._context, self._target, index, self._bad_frames, old.client_id)
        self._lanes[index] = lane
        self._poller.register(lane.socket, 0 if self._is_held else zmq.POLLIN)


def make_connector(
    run_dir: str | Path | None, curve_dir: str | Path | None, connect_timeout_s: float, ring_timeout_s: float
) -> Callable[..., Connection]:
    """Return a function that connects to the runtime that `run_dir` names, given the callbacks of a
    Connection. Raises RingClosed when none is alive, ConfigError when there are several or a key is wrong.
    """
    return partial(
        Connection,
        find_target(run_dir, curve_dir),
        connect_timeout_s=connect_timeout_s,
        ring_timeout_s=ring_timeout_s,
    )
