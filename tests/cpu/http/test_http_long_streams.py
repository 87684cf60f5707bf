"""Cost of a long answer as it is written: each token is spelled once, and no piece of work is long."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from carousel.client.core.logprobs import LogprobArrays, LogprobColumns, TokenLogprob, packed_logprobs
from carousel.client.core.result import Completion, CompletionOutput, Delta
from carousel.server.http import paced_reader
from carousel.server.http.piece_writer import PieceWriter
from carousel.server.openai import logprobs
from carousel.server.openai.chat_format import ChatCompletionFormat, ChatView
from carousel.server.openai.completion_format import CompletionFormat, CompletionView
from carousel.server.openai.logprobs import TokenSpeller
from carousel.server.responses.types import LOGPROBS
from carousel.server.sglang import generate_format
from carousel.server.sglang.generate_format import GenerateFormat, GenerateView
from carousel.server.spelling import logprob_json
from carousel.server.spelling.logprob_json import in_pieces
from carousel.server.spelling.token_table import TokenTables
from carousel.server.tenancy import unread_answers
from carousel.server.tenancy.unread_answers import UnreadAnswers
from carousel.server.tenancy.write_pace import WritePace
from runtime.wire.format import TOKEN_BYTES, pack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput, Usage
from tests.harness.http.http_front import events, http_front
from tests.harness.ring.fake_ring import finish, output

NUM_TOKENS, NUM_PROMPT, NUM_TOP = 60, 40, 5
NUM_LONG = 1000
MAX_PIECE = 2500
USAGE = Usage(NUM_PROMPT, NUM_TOKENS)


def entry(number: int, num_top: int = NUM_TOP) -> TokenLogprob:
    return TokenLogprob(number, -0.5 * number, tuple((number + each, -1.0 * each) for each in range(num_top)))


def deltas(num_tokens: int = NUM_TOKENS, num_prompt: int = NUM_PROMPT) -> list[Delta]:
    prompt = [None, *(entry(number) for number in range(1, num_prompt))]
    found = [Delta("", [], [], prompt_logprobs=prompt)]
    found += [Delta('é"', [number], [entry(number)]) for number in range(num_tokens)]
    return [*found, Delta("", [], [], "length", None, USAGE)]


def stream_of(parts: list[Delta], **view: Any) -> tuple[list[Any], list[int]]:
    """The events, and how many bytes each delta's have."""
    form = GenerateFormat(GenerateView(["r"], shows_logprobs=True, num_top=NUM_TOP, **view), 1)
    data = [b"".join(form.events(0, part)) for part in parts]
    return [json.loads(each.removeprefix(b"data: ")) for each in data if each], [len(each) for each in data]


def test_a_stream_spells_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It spelled those of the prompt once an event, 16 to 205 ms of each token."""
    made = noted_numbers(monkeypatch)
    encoded: list[int] = []
    encode = msgspec.json.encode

    def counted(value: Any) -> bytes:
        encoded.append(len(data := encode(value)))
        return data

    monkeypatch.setattr(generate_format, "_encode", counted)
    monkeypatch.setattr("carousel.server.spelling.json_list._encode", counted)
    monkeypatch.setattr(logprob_json, "_encode", counted)
    _, sizes = stream_of(deltas(), input_ids=[list(range(NUM_PROMPT))])
    assert sum(made) == (NUM_TOKENS + NUM_PROMPT - 1) * (1 + NUM_TOP)
    assert sum(encoded) < 2 * max(sizes) < sum(sizes) / 10


def test_the_last_event_is_the_whole_answer() -> None:
    parts = deltas()
    for start in (0, 7, NUM_PROMPT - 1):
        view: dict[str, Any] = {"input_ids": [list(range(NUM_PROMPT))], "input_start": start}
        shown, _ = stream_of(parts, **view)
        output = CompletionOutput(
            0,
            "".join(part.text for part in parts),
            list(range(NUM_TOKENS)),
            "",
            [],
            [each for part in parts for each in part.logprobs],
            "length",
            usage=USAGE,
        )
        form = GenerateFormat(GenerateView(["r"], shows_logprobs=True, num_top=NUM_TOP, **view), 1)
        whole = json.loads(b"".join(form.pieces([Completion([output], USAGE, parts[0].prompt_logprobs)])))
        for body in (whole, shown[-1]):
            assert body["meta_info"].pop("e2e_latency") >= 0
        assert whole == shown[-1]
        meta = whole["meta_info"]
        assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == NUM_PROMPT - start
        assert meta["input_token_logprobs"][0] == [None, start, None]
        assert meta["input_top_logprobs"][0] is None
        assert all(event["meta_info"]["input_token_logprobs"] == [] for event in shown[:-1])


def test_a_prompt_that_was_not_computed_to_its_end_has_no_values() -> None:
    (event,), _ = stream_of([Delta("", [], [], "timeout", None, USAGE)], input_ids=[[5, 6, 7]])
    assert event["meta_info"]["input_token_logprobs"] == [[None, 5, None], [None, 6, None], [None, 7, None]]
    assert event["meta_info"]["input_top_logprobs"] == [None] * 3


class Words:
    """A vocabulary of numbers."""

    def __init__(self) -> None:
        self.tables = TokenTables()

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def is_special(self, token_id: int) -> bool:
        return False


def noted_numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each call spells from now on."""
    spelled: list[int] = []
    spell = logprob_json.numbers_json

    def noted(values: Any) -> list[bytes]:
        spelled.append(len(values))
        return spell(values)

    for module in (logprob_json, logprobs):
        monkeypatch.setattr(module, "numbers_json", noted)
    return spelled


def large_delta(num_tokens: int) -> Delta:
    ids = list(range(num_tokens))
    return Delta("text", ids, [entry(number, 20) for number in ids], "length", None, USAGE)


def formats() -> list[Any]:
    speller = TokenSpeller(Words(), as_ids=False)  # type: ignore[arg-type]
    completion = CompletionView(
        "m", num_logprobs=20, speller=speller, prompt_ids=[list(range(900))], prompt_texts=["prompt"]
    )
    chat = ChatView("m", shows_logprobs=True, speller=speller)
    generate = GenerateView(["r"], shows_logprobs=True, num_top=20)
    return [CompletionFormat(completion, 1), ChatCompletionFormat(chat), GenerateFormat(generate, 1)]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_has_gathered_for_a_slow_reader_is_spelled_in_pieces(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has paused is owed up to 262,144 of them, which took half a second in one piece."""
    form, spelled = formats()[number], noted_numbers(monkeypatch)
    delta = large_delta(1000)
    if number == 0:
        delta = msgspec.structs.replace(
            delta, prompt_logprobs=[None, *(entry(each, 20) for each in range(899))]
        )
    data, most, before = b"", 0, 0
    for piece in form.events(0, delta):
        data += piece
        most, before = max(most, sum(spelled) - before), sum(spelled)
    assert before >= 1000 * 21
    assert most <= MAX_PIECE
    found = [json.loads(each.removeprefix(b"data: ")) for each in data.split(b"\n\n") if each]
    if number == 2:
        assert len(found[0]["meta_info"]["output_top_logprobs"]) == 1000
        return
    choices = [each["choices"][0] for each in found]
    assert [each["finish_reason"] for each in choices] == [None] * (len(choices) - 1) + ["length"]
    if number == 0:
        assert "".join(each["text"] for each in choices) == "prompttext"
        columns = [each["logprobs"] for each in choices]
        assert [token for each in columns for token in each["tokens"]][900:] == [
            f"<{i}>" for i in range(1000)
        ]
        offsets = [offset for each in columns for offset in each["text_offset"]]
        assert offsets == sorted(offsets)
        assert len(set(offsets)) == 1900
    else:
        assert "".join(each["delta"].get("content", "") for each in choices) == "text"
        content = [token for each in choices if each["logprobs"] for token in each["logprobs"]["content"]]
        assert [token["token"] for token in content] == [f"<{i}>" for i in range(1000)]


def test_pieces_are_whole() -> None:
    for length in (0, 1, 97, 98, 1000):
        pieces = list(in_pieces(range(length), 20))
        assert [each for piece in pieces for each in piece] == list(range(length))
        assert all(0 < len(piece) * 21 <= MAX_PIECE for piece in pieces)


def test_of_many_long_answers_a_turn_of_the_loop_writes_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of each of them in every turn was a turn of a tenth of a second, for all callers."""
    num_streams, pieces_in_turn = 10, [0]

    def work(*_: Any) -> Iterator[bytes]:
        yield b""
        yield b""
        for _number in range(6):
            if not pieces_in_turn[-1]:
                asyncio.get_running_loop().call_soon(pieces_in_turn.append, 0)
            pieces_in_turn[-1] += 1
            yield b""
        yield b"data: 1\n\n"

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        """All at once, when the last has come."""
        asked.append(request)
        if len(asked) < num_streams:
            return []
        for each in asked:
            front.ring.send(output(each, "a", finish=finish()))
        return []

    asked: list[GenerateRequest] = []
    monkeypatch.setattr(GenerateFormat, "events", work)
    with http_front(tmp_path, answer) as front:
        streams = [front.open_raw("/generate", text="x", stream=True) for _ in range(num_streams)]
        for stream in streams:
            received = b""
            while b"[DONE]" not in received:
                received += stream.recv(65536)
            stream.close()
    assert sum(pieces_in_turn) == 6 * num_streams
    assert max(pieces_in_turn) <= 2, "where one turn ends and the next begins is not seen exactly"


def test_large_writes_share_one_pace() -> None:
    async def spend() -> float:
        pace = WritePace(1e6)
        began_s = time.perf_counter()
        await asyncio.gather(*(pace.spend("", 10_000) for _ in range(4)))
        return time.perf_counter() - began_s

    assert asyncio.run(spend()) >= 0.039


def test_tenants_have_equal_parts_of_the_pace() -> None:
    """Half a second of one tenant's writes is not before the first of another."""

    async def spend() -> tuple[float, float]:
        pace, loop = WritePace(1e6), asyncio.get_running_loop()
        alices = [asyncio.create_task(pace.spend("alice", 50_000)) for _ in range(10)]
        await asyncio.sleep(0)
        began_s = loop.time()
        await asyncio.gather(*(pace.spend("bob", 10_000) for _ in range(2)))
        bob_s = loop.time() - began_s
        num_done = sum(task.done() for task in alices)
        await asyncio.gather(*alices)
        return bob_s, num_done

    bob_s, num_done = asyncio.run(spend())
    assert bob_s >= 0.039, "half of the pace"
    assert num_done < 10, "it did not wait for all of the other's"


def with_all_logprobs(request: GenerateRequest) -> list[SequenceOutput]:
    """Answer with NUM_LONG tokens at once, with the logprobs that were asked for."""
    asked = request.sampling
    num_prompt = len(request.input_ids or b"") // TOKEN_BYTES
    given: list[tuple[bytes, bytes, bytes]] = []
    for count, num_top in ((NUM_LONG, asked.logprobs), (num_prompt - 1, asked.prompt_logprobs)):
        count *= num_top is not None
        values = np.full(count, -0.5, np.float32).tobytes()
        given.append((values, pack_ids([5] * count * (num_top or 0)), values * (num_top or 0)))
    ids, end = pack_ids([5] * NUM_LONG), finish("length", NUM_LONG)
    return [SequenceOutput(request.handle, "x", ids, *given[0], end, *given[1])]


def test_of_many_logprobs_a_piece_is_unpacked_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them as objects were 2 MB of each stream, which lived as long as it did."""
    made: list[int] = []
    unpack = LogprobColumns.arrays

    def noted(columns: LogprobColumns[Any]) -> LogprobArrays:
        made.append(len(columns) * (1 + columns.num_top))
        return unpack(columns)

    monkeypatch.setattr(LogprobColumns, "arrays", noted)
    monkeypatch.setattr(LogprobColumns, "__iter__", None)
    prompt = list(range(300))
    generate = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    generate["sampling_params"] = {"max_new_tokens": NUM_LONG}
    completion = {"prompt": prompt, "max_tokens": NUM_LONG, "logprobs": 20, "echo": True}
    messages = [{"role": "user", "content": "x"}]
    chat = {"messages": messages, "max_tokens": NUM_LONG, "logprobs": True, "top_logprobs": 20}
    response = {"input": "x", "max_output_tokens": NUM_LONG, "include": [LOGPROBS], "top_logprobs": 20}
    with http_front(tmp_path, with_all_logprobs, context_length=2048) as front:
        for path, body, num_tokens in (
            ("/generate", generate, NUM_LONG + len(prompt)),
            ("/v1/completions", completion, NUM_LONG + len(prompt)),
            ("/v1/chat/completions", chat, NUM_LONG),
            ("/v1/responses", response, NUM_LONG),
        ):
            for is_stream in (False, True):
                made.clear()
                answer = front.post(path, **body, stream=is_stream)
                assert answer.status_code == 200, answer.text
                assert sum(made) >= 21 * (num_tokens - 1)
                assert max(made) <= MAX_PIECE


def test_answers_that_nobody_reads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen connections had the server hold 240 MB, and a thousand as much as there was."""
    size, num_callers = 2 << 20, 16
    make, pause = UnreadAnswers.__init__, UnreadAnswers.pause
    unread: list[int] = []

    def noted(self: UnreadAnswers, *about: Any) -> None:
        pause(self, *about)
        unread.append(self.num_bytes)

    monkeypatch.setattr(UnreadAnswers, "__init__", lambda self: make(self, size))
    monkeypatch.setattr(UnreadAnswers, "pause", noted)
    monkeypatch.setattr(unread_answers, "GRACE_S", 0.1)
    monkeypatch.setattr(unread_answers, "CHECK_S", 0.02)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": NUM_LONG}
    body |= {"logprobs": True, "top_logprobs": 20}
    data = json.dumps(body).encode()
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with http_front(tmp_path, with_all_logprobs, context_length=2048) as front, ExitStack() as stack:
        whole = len(front.post("/v1/chat/completions", **body).content)
        assert whole > size / 4
        unread.clear()
        for _ in range(num_callers):
            caller = stack.enter_context(socket.socket())
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.connect(("127.0.0.1", front.port))
            caller.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + head.encode() + data)
        deadline_s = time.monotonic() + 60
        while len(unread) < num_callers:
            assert time.monotonic() < deadline_s, "each was answered"
            time.sleep(0.02)
        assert max(unread) <= num_callers * whole / 2, "they are not spelled before they are read"
        assert len(front.post("/v1/chat/completions", **body).content) == whole


ONE_OF_ITS_KIND = re.compile(rb'"id":"[^"]*"|"created":\d+|"e2e_latency":[-.e\d]+')


@pytest.mark.parametrize("number", [0, 1, 2])
def test_packed_logprobs_are_spelled_as_their_entries(number: int) -> None:
    spelled: list[list[bytes]] = []
    prompt, delta = [None, *(entry(each, 20) for each in range(899))], large_delta(300)
    for pack in (list, packed_logprobs):
        stream, whole = formats()[number], formats()[number]
        part = msgspec.structs.replace(
            delta, prompt_logprobs=pack(prompt if number == 0 else []), logprobs=pack(delta.logprobs)
        )
        output = CompletionOutput(
            0, "text", delta.token_ids, "text", delta.token_ids, pack(delta.logprobs), "length", usage=USAGE
        )
        answer = whole.pieces([Completion([output], USAGE, part.prompt_logprobs)])
        data = [b"".join(stream.events(0, part)), b"".join(answer)]
        spelled.append([ONE_OF_ITS_KIND.sub(b"", each) for each in data])
    assert spelled[0] == spelled[1]
    assert len(b"".join(spelled[0])) > 300 * 21 * 2 * 5


def say_all(request: GenerateRequest) -> list[SequenceOutput]:
    return [output(request, "abc", finish=finish("stop", 3))]


def test_a_stream_whose_output_comes_at_once_is_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head, its event and its end were three, of 10 to 15 us each."""
    transports: list[Any] = []

    def make_writer(transport: Any, *callbacks: Any) -> PieceWriter:
        transports.append(Mock(wraps=transport))
        return PieceWriter(transports[-1], *callbacks)

    monkeypatch.setattr(paced_reader, "PieceWriter", make_writer)
    with http_front(tmp_path, say_all) as front:
        for path in ("completions", "chat/completions"):
            asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            response = front.complete(**asked) if path == "completions" else front.chat(**asked)
            told = events(response)
            assert told[-1] == "[DONE]"
            assert told[-2]["usage"]["completion_tokens"] == 3
            assert sum(each.write.call_count for each in transports) == 1
            for each in transports:
                each.write.reset_mock()
