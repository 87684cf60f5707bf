"""Connection: the I/O thread behind a client, and its sockets. Knows messages; knows no result.

    caller ── submit ──► deque ── I/O thread ──► PUSH to each tokenizer
    on_message ◄──────── I/O thread ◄─────────── a lane from each detokenizer (pings each second both ways)

Callers never touch a socket and never wait for one: they append to a deque and wake the thread. The thread
alone decides that the ring is gone, and then says so exactly once.

While a process of the ring is being replaced nothing is sent; once it is ready `on_restart` says so, and that
comes after everything that the old one had sent.

A request's number decides its way: its lane, hence the client id in its handles, and its tokenizer. What is
said about it later goes the same way.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

import zmq

from carousel.client.connection.lane import Lane, connect
from carousel.client.connection.link import Link
from carousel.client.connection.restarts import Restart, RestartedRole, Restarts
from carousel.client.connection.target import Target
from carousel.client.connection.tokenizer_way import LONG_CHARS, TokenizerWay, without_long_texts
from runtime.base.errors import CarouselError, InvalidRequest, Overloaded, RingClosed
from runtime.wire.format import PING_S, SILENCE_S
from runtime.wire.messages import AbortRequest, ControlReply, HelloAck, OutputBatch, RingStatus, ToTokenizer
from runtime.wire.transport import DECODE_ERRORS, HIGH_WATER_MARK, BadFrames, Codec, Framed

logger = logging.getLogger(__name__)

TICK_S = 0.1
RING_TIMEOUT_S = 120.0
"""How long the ring may lack a process: a large model takes long to load."""
# What callers may have waiting for one tokenizer; as much again fits into each end of the socket.
MAX_UNSENT = HIGH_WATER_MARK
FAREWELL_LINGER_MS = 200
JOIN_TIMEOUT_S = 2.0

OnMessage: TypeAlias = Callable[[OutputBatch | ControlReply | Framed], None]


class Connection:
    def __init__(
        self,
        target: Target,
        on_message: OnMessage,
        on_restart: Callable[[Restart], None],
        on_closed: Callable[[CarouselError], None],
        *,
        connect_timeout_s: float,
        ring_timeout_s: float = RING_TIMEOUT_S,
    ) -> None:
        """Start the I/O thread; `opened` is resolved once all detokenizers have answered.

        The callbacks run in the I/O thread. `on_closed` is called at most once, when the ring is gone or
        refuses us; a ring that lacks a process for longer than `ring_timeout_s` is taken for gone.
        Raises: RingClosed when there is no runtime at `target`.
        """
        self.opened: Future[None] = Future()
        self.error: CarouselError | None = None
        """Why the connection has ended; None while it has not."""
        self.max_waiting = 0
        """Sequences that the ring lets wait; valid, as all that follows, once `opened` is resolved."""
        self.generation = 0
        """How many restarts have been seen."""
        self._client_ids: tuple[int, ...] = ()
        self._ways: tuple[TokenizerWay, ...] = ()
        self._lanes: list[Lane] = []
        self._poller = zmq.Poller()
        self._links: list[Link] = []
        """Of the tokenizers, where only the connections show that they are there."""
        self._target = target
        self._watch = target.open_watch()
        self._restarts = Restarts()
        self._on_message = on_message
        self._on_restart = on_restart
        self._on_closed = on_closed
        self._connect_timeout_s = connect_timeout_s
        self._ring_timeout_s = ring_timeout_s
        self._whole_at = 0.0
        """When every process could serve, last."""
        self._requests = Codec(ToTokenizer, 0)
        self._bad_frames = BadFrames("client_out")
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant: a destructor that aborts its request may interrupt one that holds it.
        self._wake_lock = threading.RLock()
        self._pid = os.getpid()
        self._stop = False
        self._next_tick_at = 0.0
        self._next_ping_at = 0.0
        self._thread = threading.Thread(target=self._run, name="carousel-client", daemon=True)
        self._thread.start()

    # -- callers' threads ------------------------------------------------------------------------------------

    def client_of(self, number: int) -> int:
        """The client id that the handles of this request start with."""
        return self._client_ids[self.lane_of(number)]

    def lane_of(self, number: int) -> int:
        """Which detokenizer answers this request."""
        return number % len(self._client_ids)

    def tokenizer_of(self, number: int) -> int:
        """Which tokenizer takes this request."""
        return number % len(self._ways)

    @property
    def client_ids(self) -> tuple[int, ...]:
        """One for each lane."""
        return self._client_ids

    @property
    def has_room(self) -> bool:
        return all(len(way.unsent) < MAX_UNSENT for way in self._ways)

    def submit(self, message: ToTokenizer, number: int) -> None:
        """Hand a message about request `number` to the I/O thread, in order. Never blocks; sends nothing when
        it raises.

        Raises: Overloaded when the server takes messages more slowly than they come, InvalidRequest when the
        message is beyond what the wire carries, the connection's error when it has ended.
        """
        if len(self._ways[self.tokenizer_of(number)].unsent) >= MAX_UNSENT:
            raise Overloaded("the runtime takes requests more slowly than they are made; try again later")
        self._enqueue(message, number)

    def resubmit(self, message: ToTokenizer, number: int) -> None:
        """As `submit`, but never refused for want of room: what is made again is bounded by what was
        accepted.
        """
        self._enqueue(message, number)

    def abort(self, handles: tuple[bytes, ...], number: int) -> None:
        """Abort these sequences of request `number`. As `submit`, but never
        refused: aborts are bounded by the accepted requests.
        """
        self._check_usable()
        self._ways[self.tokenizer_of(number)].aborts.extend(handles)
        self._wake()

    def abort_all(self) -> None:
        """Abort everything of this connection."""
        for client_id in self._client_ids:
            for tokenizer in range(len(self._ways)):
                self._enqueue(AbortRequest(client=client_id), tokenizer)

    def close(self) -> None:
        """Send what is waiting, within a moment, and end the thread. Idempotent."""
        self._stop = True
        self._wake()
        self._thread.join(JOIN_TIMEOUT_S)
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _enqueue(self, message: ToTokenizer, number: int) -> None:
        frame = self._encode(message)
        self._check_usable()
        self._ways[self.tokenizer_of(number)].unsent.add(frame)
        self._wake()

    def _check_usable(self) -> None:
        if self.error is not None:
            raise self.error
        if self._stop:
            raise RingClosed("the client is closed")
        if os.getpid() != self._pid:
            raise RingClosed("the client belongs to the process that this one was forked from; make another")

    def _encode(self, message: ToTokenizer) -> bytearray:
        """The frame, checked by the receiver's own bounds: one that it drops is never answered."""
        try:
            frame = self._requests.encode_in_place(message)
            # To decode a long text again would take as long as to encode it.
            checked = without_long_texts(message) if len(frame) > LONG_CHARS else message
            self._requests.decode(frame if checked is message else self._requests.encode(checked))
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
        except Exception as error:  # a thread that ends in silence would leave every caller waiting
            logger.exception("the connection to the runtime has failed")
            self._end(
                RingClosed(f"the connection to the runtime has failed: {type(error).__name__}: {error}")
            )
        finally:
            context.destroy(linger=FAREWELL_LINGER_MS)
            self._watch.close()

    def _end(self, error: CarouselError) -> None:
        self.error = error
        if not self.opened.done():
            self.opened.set_exception(error)
        self._on_closed(error)

    def _open(self, context: zmq.Context[Any]) -> None:
        """Connect to the first detokenizer, and to all others that it tells of. Raises RingClosed or
        ProtocolMismatch.
        """
        deadline = time.monotonic() + self._connect_timeout_s
        self._look_at_ring()  # so that who is replaced from now on is known to have been
        first = self._open_lane(context, 0, deadline)
        for index in range(1, first.num_detokenizers):
            self._open_lane(context, index, deadline)
        self._requests = Codec(ToTokenizer, first.epoch)
        ways: list[TokenizerWay] = []
        for index in range(first.num_tokenizers):
            address = self._target.tokenizer_in(index, first.num_detokenizers)
            ways.append(TokenizerWay(connect(context, zmq.PUSH, self._target, address), self._requests))
            if self._target.wants_status:
                self._links.append(Link(ways[-1].socket))
        self._client_ids = tuple(lane.client_id for lane in self._lanes)
        self._ways = tuple(ways)
        self.max_waiting = first.max_waiting
        self._whole_at = self._next_tick_at = time.monotonic()
        self._look_at_ring()

    def _open_lane(self, context: zmq.Context[Any], index: int, deadline: float) -> HelloAck:
        lane = Lane(context, self._target, index, self._bad_frames)
        self._lanes.append(lane)
        self._poller.register(lane.socket, zmq.POLLIN)
        greet_at = time.monotonic() + PING_S
        while (now := time.monotonic()) < deadline:
            if self._stop:
                raise RingClosed("the client was closed while it was connecting")
            if lane.socket.poll(int(TICK_S * 1000)):
                ack = lane.read_ack()
                if ack is not None:
                    return ack
            if now >= greet_at:  # the first one may have died with the process that had received it
                greet_at = now + PING_S
                lane.greet()
            self._check_ring()
        raise RingClosed(
            f"the runtime at {self._target.name} has not answered within {self._connect_timeout_s:g} s; "
            f"{self._target.no_answer_hint}"
        )

    def _serve(self) -> None:
        poller = self._poller
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stop:
            ready = dict(poller.poll(int(TICK_S * 1000)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            for lane in self._lanes:
                if lane.socket in ready:
                    self._receive(lane)
            for way in self._ways:
                blocked = self._is_whole and not way.try_send()
                poller.register(way.socket, zmq.POLLOUT if blocked else 0)
            if time.monotonic() >= self._next_tick_at:
                self._tick()
        for way in self._ways:
            way.try_send()

    @property
    def _is_whole(self) -> bool:
        """Every process can serve, as far as can be seen. One that hangs may be replaced like a dead one."""
        return self._restarts.is_whole and all(
            lane.is_open and not self._is_silent(lane) for lane in self._lanes
        )

    def _has_gone(self, lane: Lane) -> bool:
        """As far as the connection shows it. A detokenizer that hangs will be replaced; one that could not
        hear us for so long has forgotten us. Both are to be greeted.
        """
        return lane.is_lost or self._is_silent(lane)

    def _is_silent(self, lane: Lane) -> bool:
        return time.monotonic() - lane.heard_at > SILENCE_S

    def _receive(self, lane: Lane) -> None:
        if not lane.is_open:
            if lane.read_ack() is not None:
                self._note_restart("detokenizer", lane.index)
            return
        for message in lane.receive():
            if isinstance(message, OutputBatch | ControlReply | Framed):
                self._on_message(message)
            elif isinstance(message, RingStatus):
                self._watch.hear(message)

    def _tick(self) -> None:
        now = time.monotonic()
        late_s, self._next_tick_at = now - self._next_tick_at, now + TICK_S
        if late_s > SILENCE_S:
            self._rejoin(now)
            return
        if now >= self._next_ping_at:
            self._next_ping_at = now + PING_S
            for lane in self._lanes:
                lane.ping() if lane.is_open else lane.greet()
        self._check_ring()
        self._look_at_ring()
        for lane in list(self._lanes):
            if lane.is_open and self._has_gone(lane):
                self._replace_lane(lane.index)
                self._check_ring()
        if self._links and not any(lane.is_open for lane in self._lanes) and self._all_links_lost:
            raise RingClosed(f"the connection to the runtime at {self._target.name} was lost")
        if self._is_whole:
            self._whole_at = now
        elif now - self._whole_at > self._ring_timeout_s:
            raise RingClosed(
                f"the runtime at {self._target.name} has lacked a process, or one that answers, for "
                f"{self._ring_timeout_s:g} s"
            )

    def _rejoin(self, now: float) -> None:
        """This process, perhaps all of the machine, was stopped for so long that it has been forgotten. How
        late others are is seen from now on, and whether they are there after a moment.
        """
        self._whole_at = now
        self._next_tick_at = now + PING_S
        for lane in list(self._lanes):
            if lane.is_open:
                self._replace_lane(lane.index)

    @property
    def _all_links_lost(self) -> bool:
        """A process that is replaced takes its own connections with it; all go with the ring alone."""
        return all(link.is_lost for link in self._links)

    # -- processes that are replaced -------------------------------------------------------------------------

    def _look_at_ring(self) -> None:
        """Who has been replaced, as far as the ring shows it."""
        status = self._watch.status()
        if status is None:
            return
        for role, index in self._restarts.take(status):
            if role != "detokenizer":
                self._note_restart(role, index)
            elif not self._target.wants_status:
                # Over TCP its connection is lost, which says it sooner and is no hearsay.
                self._replace_lane(index)

    def _note_restart(self, role: RestartedRole, index: int) -> None:
        self.generation += 1
        logger.info("%s %d was replaced or lost touch: what it may have lost is made again", role, index)
        self._on_restart(Restart(role, index, self.generation))

    def _replace_lane(self, index: int) -> None:
        """Connect anew, under the same id; what the old connection brought is still taken in."""
        old = self._lanes[index]
        if old.is_open:
            self._receive(old)  # its last words may say that the ring ends
        self._poller.unregister(old.socket)
        old.close()
        lane = Lane(self._context, self._target, index, self._bad_frames, old.client_id)
        self._lanes[index] = lane
        self._poller.register(lane.socket, zmq.POLLIN)

    def _check_ring(self) -> None:
        reason = self._watch.why_gone()
        if reason:
            raise RingClosed(f"the runtime at {self._target.name} is gone: {reason}")
