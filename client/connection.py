"""Connection: the I/O thread behind a client, and its two sockets. Knows messages; knows no result.

    caller ── submit ──► deque ── I/O thread ──► PUSH tokenizer_in
    on_message ◄──────── I/O thread ◄─────────── DEALER client_out (pings each second both ways)

Callers never touch a socket and never wait for one: they append to a deque and wake the thread. The thread
alone decides that the ring is gone, and then says so exactly once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from client.ring_watch import SILENCE_S, RingWatch
from runtime.endpoints import Endpoints
from runtime.errors import CarouselError, InvalidRequest, Overloaded, ProtocolMismatch, RingClosed
from runtime.messages import ControlReply, Hello, HelloAck, OutputBatch, Ping, ToClient, ToTokenizer
from runtime.transport import DECODE_ERRORS, HIGH_WATER_MARK, MAX_FRAME_BYTES, SCHEMA, BadFrames, Codec
from runtime.wire import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

TICK_S = 0.1
PING_S = 1.0
# What a caller may have waiting for the I/O thread; as much again fits into each end of the socket.
MAX_UNSENT = HIGH_WATER_MARK
FAREWELL_LINGER_MS = 200
JOIN_TIMEOUT_S = 2.0


class Connection:
    def __init__(
        self,
        run_dir: Path,
        on_message: Callable[[OutputBatch | ControlReply], None],
        on_closed: Callable[[CarouselError], None],
        *,
        connect_timeout_s: float,
    ) -> None:
        """Start the I/O thread; `opened` is resolved once the server has answered.

        Both callbacks run in the I/O thread. `on_closed` is called at most once, when the ring is gone or
        refuses us.
        Raises: RingClosed when there is no runtime at `run_dir`.
        """
        self.client_id = 0
        """Drawn by the server; valid once `opened` is resolved."""
        self.opened: Future[None] = Future()
        self.error: CarouselError | None = None
        """Why the connection has ended; None while it has not."""
        self._endpoints = Endpoints(run_dir)
        self._watch = RingWatch(self._endpoints)
        self._on_message = on_message
        self._on_closed = on_closed
        self._connect_timeout_s = connect_timeout_s
        self._requests = Codec(ToTokenizer, 0)
        self._replies = Codec(ToClient, 0)
        self._bad_frames = BadFrames("client_out")
        self._unsent: deque[bytes] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant: a destructor that aborts its request may interrupt one that holds it.
        self._wake_lock = threading.RLock()
        self._pid = os.getpid()
        self._stop = False
        self._last_heard = time.monotonic()
        self._next_tick_at = 0.0
        self._next_ping_at = 0.0
        self._thread = threading.Thread(target=self._run, name="carousel-client", daemon=True)
        self._thread.start()

    # -- callers' threads ------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return len(self._unsent) < MAX_UNSENT

    def submit(self, message: ToTokenizer) -> None:
        """Hand a message to the I/O thread, in order. Never blocks; sends nothing when it raises.

        Raises: Overloaded when the server takes messages more slowly than they come, InvalidRequest when the
        message is beyond what the wire carries, the connection's error when it has ended.
        """
        if not self.has_room:
            raise Overloaded("the runtime takes requests more slowly than they are made; try again later")
        self._enqueue(self._encode(message))

    def submit_unrefused(self, message: ToTokenizer) -> None:
        """As `submit`, for aborts: those are bounded by the accepted requests, so never refused."""
        self._enqueue(self._encode(message))

    def close(self) -> None:
        """Send what is waiting, within a moment, and end the thread. Idempotent."""
        self._stop = True
        self._wake()
        self._thread.join(JOIN_TIMEOUT_S)
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _encode(self, message: ToTokenizer) -> bytes:
        """The frame, checked by the receiver's own bounds: one that it drops is never answered."""
        try:
            frame = self._requests.encode(message)
            self._requests.decode(frame)
        except (TypeError, *DECODE_ERRORS) as error:
            raise InvalidRequest(f"the request cannot be sent: {error}") from None
        if len(frame) > MAX_FRAME_BYTES:
            raise InvalidRequest(
                f"the request is larger than {MAX_FRAME_BYTES >> 20} MiB", code="request_too_large"
            )
        return frame

    def _enqueue(self, frame: bytes) -> None:
        if self.error is not None:
            raise self.error
        if self._stop:
            raise RingClosed("the client is closed")
        if os.getpid() != self._pid:
            raise RingClosed("the client belongs to the process that this one was forked from; make another")
        self._unsent.append(frame)
        self._wake()

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # -- the I/O thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        try:
            self._dealer = self._connect(context, zmq.DEALER, self._endpoints.client_out)
            self._shake_hands()
            self._tokenizer = self._connect(context, zmq.PUSH, self._endpoints.tokenizer_in)
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

    @staticmethod
    def _connect(context: zmq.Context[Any], kind: int, address: str) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.connect(address)
        return socket

    def _end(self, error: CarouselError) -> None:
        self.error = error
        if not self.opened.done():
            self.opened.set_exception(error)
        self._on_closed(error)

    def _shake_hands(self) -> None:
        """Hello, and wait for HelloAck. Raises RingClosed or ProtocolMismatch."""
        self._dealer.send(self._replies.encode(Hello(PROTOCOL_VERSION, SCHEMA.hex())))
        deadline = time.monotonic() + self._connect_timeout_s
        while time.monotonic() < deadline:
            if self._stop:
                raise RingClosed("the client was closed while it was connecting")
            if self._dealer.poll(int(TICK_S * 1000)):
                ack = self._read_ack()
                if ack is not None:
                    return self._accept(ack)
            self._check_ring()
        raise RingClosed(
            f"the runtime at {self._endpoints.run_dir} has not answered within "
            f"{self._connect_timeout_s:g} s; it may still be loading its model"
        )

    def _read_ack(self) -> HelloAck | None:
        frames = self._dealer.recv_multipart(copy=True)
        try:
            message = self._replies.decode(frames[0], any_epoch=True)
        except ProtocolMismatch as error:
            raise ProtocolMismatch(
                f"this client library and the runtime are of different builds: {error}"
            ) from None
        except DECODE_ERRORS as error:
            self._bad_frames.add(error)
            return None
        return message if isinstance(message, HelloAck) else None

    def _accept(self, ack: HelloAck) -> None:
        self.client_id = ack.client
        self._requests = Codec(ToTokenizer, ack.epoch)
        self._replies = Codec(ToClient, ack.epoch)
        self._last_heard = time.monotonic()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stop:
            ready = dict(poller.poll(int(TICK_S * 1000)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._dealer in ready:
                self._receive()
            blocked = not self._send_unsent()
            poller.register(self._tokenizer, zmq.POLLOUT if blocked else 0)
            if time.monotonic() >= self._next_tick_at:
                self._tick()
        self._send_unsent()

    def _receive(self) -> None:
        """Deliver all that has arrived. What does not decode is dropped: a bad frame ends no stream."""
        for _ in range(HIGH_WATER_MARK):
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_heard = time.monotonic()
            try:
                if len(frames) != 1:
                    raise ValueError(f"a message of {len(frames)} frames where one was expected")
                message = self._replies.decode(frames[0])
            except (ProtocolMismatch, *DECODE_ERRORS) as error:
                self._bad_frames.add(error)
                continue
            if isinstance(message, OutputBatch | ControlReply):
                self._on_message(message)

    def _send_unsent(self) -> bool:
        """Send what is waiting. False: the tokenizer has no room for the rest."""
        while self._unsent:
            try:
                self._tokenizer.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._unsent.popleft()
        return True

    def _tick(self) -> None:
        now = time.monotonic()
        self._next_tick_at = now + TICK_S
        if now >= self._next_ping_at:
            self._next_ping_at = now + PING_S
            # A server that does not read will be known by its silence.
            with contextlib.suppress(zmq.Again):
                self._dealer.send(self._replies.encode(Ping(self.client_id)), zmq.NOBLOCK)
        self._check_ring()
        if now - self._last_heard > SILENCE_S:
            raise RingClosed(f"the runtime has been silent for {SILENCE_S:.0f} s")

    def _check_ring(self) -> None:
        reason = self._watch.why_gone()
        if reason:
            raise RingClosed(f"the runtime at {self._endpoints.run_dir} is gone: {reason}")
