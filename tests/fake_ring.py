"""FakeRing: the far end of a client's sockets, in a thread: the launcher's files, a PULL and a ROUTER.

It answers each request with what the test's function says, and records everything it was sent.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from runtime.config import RuntimeConfig
from runtime.endpoints import Endpoints
from runtime.messages import (
    UNIONS,
    AbortRequest,
    ControlReply,
    ControlRequest,
    ErrorInfo,
    Finish,
    FromClient,
    GenerateRequest,
    Hello,
    HelloAck,
    OutputBatch,
    Ping,
    SequenceOutput,
    Usage,
)
from runtime.process import LaunchFile
from runtime.status_page import ROLES, Status, StatusPage
from runtime.transport import SCHEMA, Codec, ZmqInbox
from runtime.wire import HEADER_BYTES, PROTOCOL_VERSION, Message, pack_ids

EPOCH = 7
WAIT_S = 5.0
PROMPT_TOKENS = 5
CLIENT_ID = 0x1234567890ABCDEF

T = TypeVar("T")
Answer = Callable[[GenerateRequest], list[SequenceOutput]]


def output(request: GenerateRequest, text: str, **fields: Any) -> SequenceOutput:
    """A piece of output with one token for each character."""
    fields.setdefault("token_ids", pack_ids([ord(character) for character in text]))
    return SequenceOutput(request.handle, text, **fields)


def finish(reason: Any = "stop", completion_tokens: int = 3, **fields: Any) -> Finish:
    return Finish(reason, Usage(PROMPT_TOKENS, completion_tokens, cached_tokens=2), **fields)


def failure(request: GenerateRequest, code: str, status: int, param: str | None = None) -> SequenceOutput:
    error = ErrorInfo(f"refused: {code}", code, param, status)
    return SequenceOutput(request.handle, finish=finish("error", 0, error=error))


def spell(text: str) -> Answer:
    """Answers with `text`: character by character in a stream, at once otherwise."""

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        end = finish("stop", len(text))
        if not request.stream:
            return [output(request, text, finish=end)]
        return [
            *(output(request, character) for character in text),
            SequenceOutput(request.handle, finish=end),
        ]

    return answer


def say_nothing(_: GenerateRequest) -> list[SequenceOutput]:
    return []


class FakeRing:
    def __init__(self, run_dir: Path, answer: Answer, config: RuntimeConfig | None = None) -> None:
        self.run_dir = run_dir
        self.answer = answer
        self.requests: list[GenerateRequest] = []
        self.aborts: list[AbortRequest] = []
        self.pings: list[Ping] = []
        self.info: dict[str, Any] = {}
        """What it adds to the name of the operation when it is asked about itself."""
        self.shakes_hands = True
        self.foreign_header = b""
        """Sent instead of HelloAck, as a detokenizer of another build does."""
        self._endpoints = Endpoints(run_dir)
        config = config or RuntimeConfig(served_model_name="fake", device="cpu", context_length=64)
        launch = LaunchFile(config, EPOCH)
        self._endpoints.config_file.write_bytes(msgspec.json.encode(launch))
        self._endpoints.state_file.write_text(json.dumps({"state": "ready", "pid": os.getpid()}))
        self.status = StatusPage(self._endpoints.status_file, create=True)
        self.set_all("ready")
        self._changed = threading.Condition()
        self._outbox: list[Message] = []
        self._frames: list[bytes] = []
        self._bound = threading.Event()
        self._stop = threading.Event()
        self._codec = Codec(FromClient, EPOCH)
        self._peer = b""
        self._thread = threading.Thread(target=self._run, name="fake-ring")
        self._thread.start()
        assert self._bound.wait(WAIT_S)

    # -- the test's thread -----------------------------------------------------------------------------------

    def set_state(self, role: str, state: str, *, pid: int | None = None) -> None:
        pid = os.getpid() if pid is None else pid
        self.status.write(role, Status(EPOCH, pid, state, time.monotonic_ns()))

    def set_all(self, state: str) -> None:
        for role in ROLES:
            self.set_state(role, state)

    def send(self, *outputs: SequenceOutput) -> None:
        """Send outputs as one batch, from the ring's thread."""
        self.send_message(OutputBatch(outputs))

    def send_message(self, message: Message) -> None:
        with self._changed:
            self._outbox.append(message)

    def send_frame(self, frame: bytes) -> None:
        """Send something that is not a message."""
        with self._changed:
            self._frames.append(frame)

    def wait_for(self, found: Callable[[], T]) -> T:
        """The first true value of `found`, looked at whenever something has arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(found()), WAIT_S), "the ring was not sent it in time"
            return found()

    def wait_request(self, number: int = 0) -> GenerateRequest:
        self.wait_for(lambda: len(self.requests) > number)
        return self.requests[number]

    def wait_abort(self) -> AbortRequest:
        return self.wait_for(lambda: self.aborts[:1])[0]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self.status.close()

    # -- the ring's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        inbox = ZmqInbox(context, self._endpoints.tokenizer_in, "tokenizer_in", EPOCH)
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self._endpoints.client_out)
        self._bound.set()
        poller = zmq.Poller()
        poller.register(inbox.socket, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._stop.is_set():
            poller.poll(5)
            with self._changed:
                self._read_clients()
                self._flush()
                for message in inbox.drain():
                    self._on_request(message)
                self._changed.notify_all()
        inbox.close()
        context.destroy(linger=0)

    def _read_clients(self) -> None:
        while self._router.poll(0):
            self._peer, frame = self._router.recv_multipart()
            message = self._codec.decode(frame, any_epoch=True)
            if isinstance(message, Hello):
                if self.foreign_header:
                    self._router.send_multipart([self._peer, self.foreign_header])
                elif self.shakes_hands:
                    self._send(HelloAck(CLIENT_ID, EPOCH, PROTOCOL_VERSION, SCHEMA.hex()))
            else:
                self.pings.append(message)

    def _on_request(self, message: Any) -> None:
        if isinstance(message, AbortRequest):
            self.aborts.append(message)
        elif isinstance(message, ControlRequest):
            body = msgspec.Raw(msgspec.msgpack.encode({"op": message.op, **self.info}))
            self._send(ControlReply(message.client, message.number, body))
        else:
            self.requests.append(message)
            for each in self.answer(message):
                self._send(OutputBatch((each,)))

    def _flush(self) -> None:
        for message in self._outbox:
            self._send(message)
        for frame in self._frames:
            self._router.send_multipart([self._peer, frame])
        self._outbox.clear()
        self._frames.clear()

    def _send(self, message: Message) -> None:
        self._router.send_multipart([self._peer, self._codec.encode(message)])


def foreign_header() -> bytes:
    """The first bytes of a build that speaks another version."""
    own = Codec(UNIONS["client_out"], EPOCH).header
    return own[:4] + (PROTOCOL_VERSION + 8).to_bytes(2, "little") + own[6:HEADER_BYTES]


@contextmanager
def fake_ring(
    run_dir: Path, answer: Answer = say_nothing, config: RuntimeConfig | None = None
) -> Iterator[FakeRing]:
    ring = FakeRing(run_dir, answer, config)
    try:
        yield ring
    finally:
        ring.close()
