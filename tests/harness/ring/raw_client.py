"""RawClient: a client of the ring that sends any frames, and reads the answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import zmq

from runtime.ring.endpoints import Endpoints
from runtime.wire.format import PROTOCOL_VERSION
from runtime.wire.messages import UNIONS, Finish, Hello, HelloAck, OutputBatch, Ping
from runtime.wire.transport import SCHEMA, MessageCodec
from tests.harness.ring.launched import SLACK

WAIT_S = 20.0 * SLACK


class RawClient:
    """Client of a launch with one tokenizer and one detokenizer, by frames alone."""

    def __init__(self, run_dir: Path, epoch: int) -> None:
        endpoints = Endpoints(run_dir)
        self.codec = MessageCodec(UNIONS["tokenizer_in"], epoch)
        """Codec of the frames that `send` takes."""
        self._in = MessageCodec(UNIONS["client_in"], epoch)
        self._out = MessageCodec(UNIONS["client_out"], epoch)
        self._context: zmq.Context[Any] = zmq.Context()
        self._dealer = self._connect(zmq.DEALER, endpoints.client_out())
        self._tokenizer = self._connect(zmq.PUSH, endpoints.tokenizer_in())
        self._dealer.send(self._in.encode(Hello(PROTOCOL_VERSION, SCHEMA.hex())))
        ack = self._receive(time.monotonic() + WAIT_S)
        assert isinstance(ack, HelloAck)
        self.id = ack.client

    def _connect(self, kind: int, address: str) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        return socket

    def send(self, frames: list[bytes]) -> None:
        """To the tokenizer."""
        self._tokenizer.send_multipart(frames)

    def wait_finish(self, handle: bytes) -> Finish:
        """The terminal of a sequence. Raises TimeoutError."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            message = self._receive(deadline_s)
            for output in message.outputs if isinstance(message, OutputBatch) else ():
                if output.handle == handle and output.finish is not None:
                    return output.finish

    def _receive(self, deadline_s: float) -> Any:
        # A client that says nothing for long is taken for gone.
        while not self._dealer.poll(1000):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the ring has not answered in time")
            self._dealer.send(self._in.encode(Ping(self.id)))
        return self._out.decode(self._dealer.recv_multipart()[0])

    def close(self) -> None:
        self._context.destroy()
