"""FakeRing: the far end of a client's sockets, in a thread, with the launcher's files, a PULL and a ROUTER.

It answers each request with the result of the test's function, and records all messages that it receives.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.auth import load_certificate
from zmq.auth.thread import ThreadAuthenticator

from runtime.ring.endpoints import Endpoints
from runtime.ring.process import LaunchFile
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import HEADER_BYTES, PROTOCOL_VERSION, Message, pack_ids
from runtime.wire.handle import client_of, sibling
from runtime.wire.messages import (
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
    TensorBatch,
    ToTokenizer,
    Usage,
)
from runtime.wire.status_page import ROLES, ProcessStatus, StatusPage
from runtime.wire.transport import SCHEMA, MessageCodec, bind_private
from tests.harness.ring.launched import SLACK, free_ports

EPOCH = 7
WAIT_S = 5.0 * SLACK
STATS_OPS = ("iteration_stats", "request_stats")
NO_STATS = {"records": [], "numDropped": 0, "newest": 0}
VERSION = "of-the-fake"
PROMPT_TOKENS = 5
CLIENT_ID = 0x1234567890ABCDEF

T = TypeVar("T")
Answer = Callable[[GenerateRequest], list[SequenceOutput]]


def output(request: GenerateRequest, text: str, *, index: int = 0, **fields: Any) -> SequenceOutput:
    """A piece of output of one sequence, with one token for each character."""
    if "token_ids" not in fields:
        fields["token_ids"] = pack_ids([ord(character) for character in text])
    return SequenceOutput(sibling(request.handle, index), text, **fields)


def finish(reason: Any = "stop", completion_tokens: int = 3, **fields: Any) -> Finish:
    fields = {"weight_version": VERSION, **fields}
    return Finish(reason, Usage(PROMPT_TOKENS, completion_tokens, cached_tokens=2), **fields)


def failure(
    request: GenerateRequest,
    code: str,
    status: int,
    param: str | None = None,
    *,
    index: int = 0,
    retry_after_s: float = 0.0,
) -> SequenceOutput:
    error = ErrorInfo(f"refused: {code}", code, param, status, retry_after_s)
    return SequenceOutput(sibling(request.handle, index), finish=finish("error", 0, error=error))


def spell(text: str) -> Answer:
    """Answers with `text`: character by character in a stream, at once otherwise."""

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        end = finish("stop", len(text))
        if not request.stream:
            return [output(request, text, finish=end)]
        lengths = [PROMPT_TOKENS] + [0] * len(text)
        return [
            *(
                output(request, character, num_prompt_tokens=length)
                for character, length in zip(text, lengths, strict=False)
            ),
            SequenceOutput(request.handle, finish=end),
        ]

    return answer


def say_nothing(_: GenerateRequest) -> list[SequenceOutput]:
    return []


class TcpDoor:
    """Free ports on this machine for a ring's sockets, behind CURVE. `curve_dir`: the server's key in
    `server.key_secret`, those of the clients that may come in `clients`.
    """

    def __init__(self, num_ports: int, curve_dir: Path) -> None:
        self.port = free_ports(num_ports)
        self._curve_dir = curve_dir

    @contextmanager
    def guarded(self, context: zmq.Context[Any]) -> Iterator[None]:
        """Look up clients' keys while the block runs."""
        guard = ThreadAuthenticator(context)
        guard.start()
        guard.configure_curve(location=self._curve_dir / "clients")
        try:
            yield
        finally:
            guard.stop()

    def prepare(self, socket: zmq.Socket[Any]) -> None:
        public, secret = load_certificate(self._curve_dir / "server.key_secret")
        assert secret is not None
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_server = True


class FakeRing:
    def __init__(
        self,
        run_dir: Path,
        answer: Answer,
        config: RuntimeConfig | None = None,
        *,
        num_tokenizers: int = 1,
        num_detokenizers: int = 1,
        door: TcpDoor | None = None,
    ) -> None:
        """With a `door`, its sockets are there instead of in the run directory."""
        self.run_dir = run_dir
        self.answer = answer
        self.requests: list[GenerateRequest] = []
        self.aborts: list[AbortRequest] = []
        self.pings: list[Ping] = []
        self.hellos: list[Hello] = []
        self.arrivals: list[tuple[int, Message]] = []
        """Everything that came to a tokenizer, with its number."""
        self.info: dict[str, Any] = {}
        """Return the text that follows the operation's name when the ring is asked about itself."""
        self.sampled: set[str] = set()
        """Labels of which each detokenizer has a timeline."""
        self.shakes_hands = True
        self.lets_in = threading.Event()
        """While it is cleared nothing is read after a Hello, which is answered when it is set."""
        self.lets_in.set()
        self.answers_questions = True
        self.foreign_header = b""
        """Sent instead of HelloAck, as a detokenizer of another build does."""
        self.num_tokenizers = num_tokenizers
        self.num_detokenizers = num_detokenizers
        self._door = door
        self._endpoints = Endpoints(run_dir)
        self._lock = self._endpoints.lock_file.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        config = config or RuntimeConfig(served_model_name="fake", device="cpu", context_length=64)
        self._max_waiting = config.max_waiting
        launch = LaunchFile(config)
        self._endpoints.config_file.write_bytes(msgspec.json.encode(launch))
        self._endpoints.state_file.write_text(json.dumps({"state": "ready", "pid": os.getpid()}))
        self.status = StatusPage(self._endpoints.status_file, create=True)
        self.set_all("ready")
        self._changed = threading.Condition()
        self._outbox: list[tuple[Message, tuple[bytes, ...]]] = []
        self._frames: list[bytes] = []
        self._bound = threading.Event()
        self._stop = threading.Event()
        self._from_client = MessageCodec(FromClient, EPOCH)
        self._to_tokenizer = MessageCodec(ToTokenizer, EPOCH)
        self._peers = [b""] * num_detokenizers
        self._thread = threading.Thread(target=self._run, name="fake-ring")
        self._thread.start()
        assert self._bound.wait(WAIT_S)

    # -- the test's thread -----------------------------------------------------------------------------------

    def set_state(self, role: str, state: str, *, pid: int | None = None, **fields: Any) -> None:
        """`fields`: of ProcessStatus."""
        pid = os.getpid() if pid is None else pid
        self.status.write(role, ProcessStatus(EPOCH, pid, state, time.monotonic_ns(), **fields))

    def set_all(self, state: str) -> None:
        for role in ROLES:
            self.set_state(role, state)

    def client_id(self, lane: int) -> int:
        return CLIENT_ID - CLIENT_ID % self.num_detokenizers + lane

    def send(self, *outputs: SequenceOutput) -> None:
        """Send outputs as one batch, from the ring's thread; all must be of one lane."""
        self.send_message(OutputBatch(outputs))

    def send_message(self, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Send to the lane that the message is for; what is for none, to the first one."""
        with self._changed:
            self._outbox.append((message, tuple(frames)))

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

    def aborted(self) -> list[bytes]:
        """The handles that were aborted, one by one; one message may carry several."""
        return [handle for abort in self.aborts for handle in abort.handles]

    def wait_abort(self) -> AbortRequest:
        return self.wait_for(lambda: self.aborts[:1])[0]

    def release_lock(self) -> None:
        """Let go of the lock, as the kernel does when a launcher dies."""
        self._lock.close()

    def close(self) -> None:
        self._lock.close()
        self._stop.set()
        self._thread.join(WAIT_S)
        self.status.close()

    # -- the ring's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        with ExitStack() as stack:
            if self._door is not None:
                stack.enter_context(self._door.guarded(context))
            self._routers = [
                self._listen(context, zmq.ROUTER, number) for number in range(self.num_detokenizers)
            ]
            inboxes = [self._listen(context, zmq.PULL, number) for number in range(self.num_tokenizers)]
            self._bound.set()
            poller = zmq.Poller()
            for socket in (*self._routers, *inboxes):
                poller.register(socket, zmq.POLLIN)
            while not self._stop.is_set():
                poller.poll(5)
                with self._changed:
                    for lane in range(self.num_detokenizers):
                        self._read_clients(lane)
                    self._flush()
                    for number, inbox in enumerate(inboxes):
                        self._read_requests(number, inbox)
                    self._changed.notify_all()
        context.destroy(linger=0)

    def _listen(self, context: zmq.Context[Any], kind: int, number: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = context.socket(kind)
        # A ROUTER drops what a slow reader's queue has no room for; the real one keeps it and tries again.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if self._door is not None:
            self._door.prepare(socket)
            offset = number if kind == zmq.ROUTER else self.num_detokenizers + number
            socket.bind(f"tcp://127.0.0.1:{self._door.port + offset}")
        elif kind == zmq.ROUTER:
            bind_private(socket, self._endpoints.client_out(number))
        else:
            bind_private(socket, self._endpoints.tokenizer_in(number))
        return socket

    def _read_clients(self, lane: int) -> None:
        router = self._routers[lane]
        while router.poll(0):
            peer, frame = router.recv_multipart()
            self._peers[lane] = peer
            message = self._from_client.decode(frame, any_epoch=True)
            if isinstance(message, Ping):
                self.pings.append(message)
                continue
            self.hellos.append(message)
            if self.foreign_header:
                router.send_multipart([peer, self.foreign_header])
            elif self.shakes_hands:
                self.lets_in.wait(WAIT_S)
                self._send(lane, self._ack(lane))

    def _ack(self, lane: int) -> HelloAck:
        return HelloAck(
            self.client_id(lane),
            EPOCH,
            PROTOCOL_VERSION,
            SCHEMA.hex(),
            num_tokenizers=self.num_tokenizers,
            num_detokenizers=self.num_detokenizers,
            max_waiting=self._max_waiting,
        )

    def _read_requests(self, number: int, inbox: zmq.Socket[Any]) -> None:
        while inbox.poll(0):
            message = self._to_tokenizer.decode(inbox.recv())
            self.arrivals.append((number, message))
            self._on_request(message)

    def _on_request(self, message: Any) -> None:
        if isinstance(message, AbortRequest):
            self.aborts.append(message)
        elif isinstance(message, ControlRequest):
            if not self.answers_questions:
                return
            stats = NO_STATS if message.op in STATS_OPS else {}
            answer: Any = {"op": message.op, **stats, **self.info}
            if message.op == "timeline":
                is_known = message.label in self.sampled
                answer = [{"label": message.label, "lane": self._lane_of_client(message)}] * is_known
            body = msgspec.Raw(msgspec.msgpack.encode(answer))
            reply = ControlReply(message.client, message.number, body)
            self._send(self._lane_of(reply), reply)
        else:
            self.requests.append(message)
            for each in self.answer(message):
                batch = OutputBatch((each,))
                self._send(self._lane_of(batch), batch)

    def _lane_of_client(self, question: ControlRequest) -> int:
        return question.client % self.num_detokenizers

    def _lane_of(self, message: Any) -> int:
        client = 0
        if isinstance(message, OutputBatch):
            client = client_of(message.outputs[0].handle)
        elif isinstance(message, TensorBatch):
            client = client_of(message.entries[0].handle)
        elif isinstance(message, ControlReply):
            client = message.client
        return client % self.num_detokenizers

    def _flush(self) -> None:
        for message, frames in self._outbox:
            self._send(self._lane_of(message), message, frames)
        for frame in self._frames:
            self._routers[0].send_multipart([self._peers[0], frame])
        self._outbox.clear()
        self._frames.clear()

    def _send(self, lane: int, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        head = self._from_client.header + msgspec.msgpack.encode(message)
        self._routers[lane].send_multipart([self._peers[lane], head, *frames])


def foreign_header() -> bytes:
    """The first bytes of a build that speaks another version."""
    own = MessageCodec(UNIONS["client_out"], EPOCH).header
    return own[:4] + (PROTOCOL_VERSION + 8).to_bytes(2, "little") + own[6:HEADER_BYTES]


@contextmanager
def fake_ring(
    run_dir: Path, answer: Answer = say_nothing, config: RuntimeConfig | None = None, **more: Any
) -> Iterator[FakeRing]:
    ring = FakeRing(run_dir, answer, config, **more)
    try:
        yield ring
    finally:
        ring.close()
