"""Memory of answers that wait for their callers: large ones are spelled as they are read, and all count."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from carousel.client.core.logprobs import LogprobColumns
from carousel.client.core.mailbox import ITEM_BYTES
from carousel.client.core.result import Delta
from carousel.client.core.streams import AsyncResultStream
from carousel.server.http.piece_writer import PieceWriter
from carousel.server.openai.chat_format import ChatView
from carousel.server.openai.logprobs import TokenSpeller
from carousel.server.responses.answer_format import ResponsesFormat
from carousel.server.responses.types import LOGPROBS, ResponseBody
from carousel.server.sglang.generate_format import GenerateFormat, GenerateView
from carousel.server.sglang.grown_logprobs import JsonRoom
from carousel.server.spelling.token_table import MAX_KNOWN, TokenTable, TokenTables
from carousel.server.tenancy import unread_answers
from carousel.server.tenancy.fair_threads import FairThreads
from carousel.server.tenancy.unread_answers import UnreadAnswers
from runtime.wire.format import pack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput, Usage
from tests.harness.http.http_front import Front, http_front, raw_request
from tests.harness.ring.fake_ring import finish, output

NUM_TOKENS, NUM_TOP = 500, 20
NUM_VALUES = NUM_TOKENS * (1 + NUM_TOP)
NUM_KNOWN = 500
PACKED_BYTES = 8 * NUM_VALUES
MAX_EVENT_PIECE = 512 << 10
CLOSED = -1


class Letters:
    """A vocabulary in which each token is a letter."""

    def __init__(self) -> None:
        self.tables = TokenTables()

    def token_text(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


def columns(num_tokens: int) -> tuple[list[int], LogprobColumns[Any]]:
    """Ids of tokens, and their logprobs, which are all different."""
    rng = np.random.default_rng(num_tokens)
    ids = rng.integers(0, NUM_KNOWN, num_tokens)
    num_top = NUM_TOP * num_tokens
    values, tops = (-20 * rng.random(count, np.float32) for count in (num_tokens, num_top))
    packed = LogprobColumns[Any](
        pack_ids(ids), values.tobytes(), pack_ids(rng.integers(0, NUM_KNOWN, num_top)), tops.tobytes()
    )
    return ids.tolist(), packed


def speller() -> TokenSpeller:
    return TokenSpeller(Letters(), as_ids=False)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> ResponseBody:
    """An answer of /v1/responses as it begins."""

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [output(request, "x", finish=finish())]

    with http_front(tmp_path_factory.mktemp("run"), answer) as front:
        whole = msgspec.json.decode(front.post("/v1/responses", input="x").content, type=ResponseBody)
    return msgspec.structs.replace(whole, output=[], usage=None)


def test_a_stream_of_a_response_keeps_its_logprobs_packed(head: ResponseBody) -> None:
    """Its last events repeat them all. As JSON they were 20 MB of each stream, for 12,000 tokens."""
    own, (ids, packed) = speller(), columns(NUM_TOKENS)
    form = ResponsesFormat(ChatView("m", shows_logprobs=True, speller=own), head, {}, skips_special=True)
    for token_id in range(NUM_KNOWN):
        assert own.items[token_id], "known from other answers"
    for _ in form.events(0, Delta("x", ids[:1], packed.part(0, 1), num_prompt_tokens=1)):
        pass
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for at in range(1, NUM_TOKENS):
            for _ in form.events(0, Delta("x", ids[at : at + 1], packed.part(at, at + 1))):
                pass
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        end = Delta("", [], [], "length", None, Usage(1, NUM_TOKENS))
        sizes = [len(piece) for piece in form.events(0, end)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1.5 * PACKED_BYTES
    assert peak - after < 3 * MAX_EVENT_PIECE, "they are spelled as they are written"
    assert max(sizes) < MAX_EVENT_PIECE
    assert sum(sizes) > 4 * 55 * NUM_VALUES, "four events have all of them"


def test_logprobs_of_generate_stay_packed_where_other_streams_have_the_room() -> None:
    ids, packed = columns(NUM_TOKENS)
    deltas = [
        Delta("x", ids[at : at + 10], packed.part(at, at + 10), num_prompt_tokens=1)
        for at in range(0, NUM_TOKENS, 10)
    ]
    deltas.append(Delta("", [], [], "length", None, Usage(1, NUM_TOKENS)))
    events: list[list[bytes]] = []
    for size in (1 << 30, 20_000, 0):
        room = JsonRoom(size)
        form = GenerateFormat(GenerateView(["r"], shows_logprobs=True, num_top=NUM_TOP, room=room), 1)
        events.append([b"".join(form.events(0, delta)).partition(b',"e2e_latency"')[0] for delta in deltas])
        assert (form.num_kept_bytes > 2 * PACKED_BYTES) == (size == 1 << 30)
        assert form.num_kept_bytes < 1.5 * PACKED_BYTES or size == 1 << 30
        assert (form.write_cost == 1) == (size == 1 << 30)
        del form
        assert room.num_left == size
    assert events[0] == events[1] == events[2]


def test_what_is_known_of_tokens_is_bounded() -> None:
    made: list[int] = []
    table = TokenTable[int](lambda token_id: made.append(token_id) or token_id)  # type: ignore[func-returns-value]
    for token_id in range(2 * MAX_KNOWN + 5):
        assert table[token_id] == token_id
        assert len(table) <= MAX_KNOWN
    assert table[2 * MAX_KNOWN] == 2 * MAX_KNOWN
    assert len(made) == 2 * MAX_KNOWN + 5


# -- callers who do not read ---------------------------------------------------------------------------------


def with_logprobs(request: GenerateRequest) -> list[SequenceOutput]:
    """Answer with NUM_TOKENS at once."""
    ids, packed = columns(NUM_TOKENS)
    arrays = packed.arrays()
    return [
        output(
            request,
            "x",
            token_ids=pack_ids(ids),
            logprobs=arrays.values.tobytes(),
            top_ids=arrays.top_ids.tobytes(),
            top_logprobs=arrays.top_values.tobytes(),
            finish=finish("length", NUM_TOKENS),
        )
    ]


def with_text(request: GenerateRequest) -> list[SequenceOutput]:
    text = "x" * 140_000
    return [output(request, text, token_ids=pack_ids([5]), finish=finish("length", 1))]


@contextmanager
def counted_front(run_dir: Path, answer: Any, size: int) -> Iterator[tuple[Front, list[int]]]:
    """A server with this limit of unread bytes, and how many it has counted after each change. CLOSED stands
    for a connection that was closed.
    """
    make, add, close = UnreadAnswers.__init__, UnreadAnswers.add, UnreadAnswers._close_slow
    counted: list[int] = []

    def noted(self: UnreadAnswers, *reader: Any) -> None:
        add(self, *reader)
        counted.append(self.num_bytes)

    def close_slow(self: UnreadAnswers, *given: Any) -> int:
        num_closed = close(self, *given)
        counted.extend([CLOSED] * num_closed)
        return num_closed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnreadAnswers, "__init__", lambda self: make(self, size))
        patch.setattr(UnreadAnswers, "add", noted)
        patch.setattr(UnreadAnswers, "_close_slow", close_slow)
        patch.setattr(unread_answers, "GRACE_S", 0.2)
        patch.setattr(unread_answers, "CHECK_S", 0.02)
        patch.setattr(unread_answers, "GROWTH_S", 0.05)
        with http_front(run_dir, answer, context_length=2048) as front:
            yield front, counted


def slow_caller(stack: ExitStack, front: Front, data: bytes) -> socket.socket:
    caller = stack.enter_context(socket.socket())
    caller.settimeout(30.0)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.connect(("127.0.0.1", front.port))
    caller.sendall(data)
    return caller


def ends_early(caller: socket.socket, end: bytes) -> bool:
    """Read the rest; True if the answer was broken off."""
    last = b""
    try:
        while part := caller.recv(1 << 16):
            last = (last + part)[-64:]
            if end in last:
                return False
    except ConnectionResetError:
        pass
    return True


RESPONSE: dict[str, Any] = {
    "input": "x",
    "max_output_tokens": NUM_TOKENS,
    "include": [LOGPROBS],
    "top_logprobs": NUM_TOP,
}


@pytest.mark.parametrize("is_stream", [False, True])
def test_answers_that_are_spelled_as_they_are_read_count_by_what_they_keep(
    tmp_path: Path, is_stream: bool
) -> None:
    """Streams whose last events nobody read held 20 MB each, which nothing counted."""
    num_callers, size = 6, 4 * PACKED_BYTES
    end = b"\r\n0\r\n\r\n"
    with counted_front(tmp_path, with_logprobs, size) as (front, counted), ExitStack() as stack:
        data = raw_request("/v1/responses", stream=is_stream, **RESPONSE)
        callers = [slow_caller(stack, front, data) for _ in range(num_callers)]
        for caller in callers * is_stream:
            seen = b""
            with suppress(ConnectionResetError):
                while b"response.output_text.done" not in seen and (part := caller.recv(1 << 16)):
                    seen = seen[-64:] + part
        deadline_s = time.monotonic() + 30
        while max(counted, default=0) <= size or CLOSED not in counted:
            assert time.monotonic() < deadline_s, "each counts by what it keeps"
            time.sleep(0.02)
        num_closed = sum(ends_early(caller, end) for caller in callers)
        assert 1 <= num_closed < num_callers
        assert not ends_early(slow_caller(stack, front, data), end), "who reads gets it all"


def test_logprobs_count_from_when_they_come_until_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that waited did not count once the sequence had ended, and those written counted below zero."""
    counts: list[tuple[int, int]] = []
    done_with = AsyncResultStream.done_with_logprobs

    def noted(self: AsyncResultStream, delta: Delta) -> Callable[[], None]:
        forget = done_with(self, delta)
        assert self.state is not None
        assert not any(each.logprobs for each in self.state.sequences), "they are kept once"

        def forget_noted() -> None:
            before = self.num_logprob_bytes
            forget()
            counts.append((before, self.num_logprob_bytes))

        return forget_noted

    def in_two_parts(request: GenerateRequest) -> list[SequenceOutput]:
        (last,) = with_logprobs(request)
        return [msgspec.structs.replace(last, finish=None), last]

    monkeypatch.setattr(AsyncResultStream, "done_with_logprobs", noted)
    with http_front(tmp_path, in_two_parts, context_length=2048) as front:
        front.post("/v1/responses", stream=True, **RESPONSE)
    assert max(before for before, _ in counts) >= PACKED_BYTES
    assert min(after for _, after in counts) == counts[-1][1] == 0


def test_an_answer_in_pieces_has_no_chunks_in_http_1_0(tmp_path: Path) -> None:
    with http_front(tmp_path, with_logprobs, context_length=2048) as front, ExitStack() as stack:
        for is_stream in (False, True):
            request = raw_request("/v1/responses", stream=is_stream, **RESPONSE)
            caller = stack.enter_context(front.connect())
            caller.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            data = b"".join(iter(lambda caller=caller: caller.recv(1 << 16), b""))  # type: ignore[misc]
            head, _, body = data.partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head.lower()
            assert b"content-length" not in head.lower(), "it ends with the connection"
            whole = json.loads(body.rpartition(b"\ndata: ")[2])["response"] if is_stream else json.loads(body)
            assert whole["status"] == "incomplete"
            assert len(whole["output"][0]["content"][0]["logprobs"]) == NUM_TOKENS


def test_small_answers_that_nobody_reads_count_too(tmp_path: Path) -> None:
    """2,000 connections with 60 KB each were 120 MB that nothing counted."""
    num_callers = 12
    with counted_front(tmp_path, with_text, 1 << 30) as (front, counted), ExitStack() as stack:
        front.complete()
        data = raw_request("/v1/completions", prompt="x")
        for _ in range(num_callers):
            slow_caller(stack, front, data)
        deadline_s = time.monotonic() + 30
        while len(counted) < num_callers:
            assert time.monotonic() < deadline_s, "all of each counts"
            time.sleep(0.02)
        assert max(counted) <= num_callers * 64 << 10, "the answers are larger than what is tested"
        assert max(counted) >= num_callers * PieceWriter.piece_bytes


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_long_plain_answers_wait_for_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Those of a thousand connections waited for one, with all their text, which nothing counted."""
    monkeypatch.setattr(FairThreads, "run", None)
    body: dict[str, Any] = {"text": "x"} if path == "/generate" else {"prompt": "x"}
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "x"}]}
    with http_front(tmp_path, with_text) as front:
        assert len(front.post(path, **body).content) > 140_000


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_output_that_comes_for_a_stream_that_nobody_reads_counts(tmp_path: Path, prompt: Any) -> None:
    """It waited as objects, 280 bytes for a token, which nothing counted: streams that are not read took what
    all their tokens take.
    """
    size, end, asked = 1 << 20, b"data: [DONE]\n\n", list[GenerateRequest]()

    def begin(request: GenerateRequest) -> list[SequenceOutput]:
        asked.append(request)
        return [output(request, "x" * 500_000, token_ids=pack_ids([5]))]

    with counted_front(tmp_path, begin, size) as (front, counted), ExitStack() as stack:
        caller = slow_caller(stack, front, raw_request("/v1/completions", prompt=prompt, stream=True))
        deadline_s = time.monotonic() + 30
        while not counted:
            assert time.monotonic() < deadline_s, "it does not wait for its caller"
            time.sleep(0.02)
        while CLOSED not in counted:
            assert time.monotonic() < deadline_s, "what has come counts"
            for _ in range(size // ITEM_BYTES // 20):
                front.ring.send(output(asked[0], "x", token_ids=pack_ids([5])))
            time.sleep(0.02)
        assert ends_early(caller, end)


def test_many_connections_are_looked_at_in_a_few_milliseconds() -> None:
    class Transport:
        def get_write_buffer_size(self) -> int:
            return 8000

        def abort(self) -> None:
            pass

    async def look() -> float:
        unread = UnreadAnswers(1 << 40)
        for number in range(8192):
            unread.pause(Transport(), str(number % 7))  # type: ignore[arg-type]
        unread._size = 1 << 10
        times = []
        for _ in range(3):
            began_s = time.thread_time()
            unread._look()
            times.append(time.thread_time() - began_s)
        return min(times)

    assert asyncio.run(look()) < 0.1
