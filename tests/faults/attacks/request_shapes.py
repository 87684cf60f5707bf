"""Cost of requests of every shape to the HTTP process: a table of CPU seconds for each MiB sent, the longest
piece of work on its event loop, and the memory it takes beyond the answer.

The server is the real one, over a fake ring that answers at once, so that all CPU time counted is the HTTP
process's. Its event loop is asyncio's, each of whose callbacks is timed by the CPU time of its thread.
Run: python -m tests.faults.attacks.request_shapes [TEXT ...], for a few minutes, or for the shapes whose path
or name has one of the texts; the last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import tempfile
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from carousel.server.garbage import collect_new_objects_alone
from carousel.server.responses.types import LOGPROBS
from runtime.wire.format import pack_ids
from runtime.wire.handle import sibling
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import finish, output

BODY_BYTES = (8 << 20) - 4096
CONTEXT = 16_384
MAX_PIECE_S = 0.020
MAX_MEMORY_BYTES = 64 << 20
REPEATS = 3
SETTINGS: dict[str, Any] = {
    "context_length": CONTEXT,
    "tool_call_parser": "hermes",
    "max_running_requests": 256,
    "max_queued_requests": 4096,
}
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


@dataclass(frozen=True)
class Shape:
    name: str
    path: str
    body: bytes

    def request(self) -> bytes:
        method = "POST" if self.body else "GET"
        head = f"{method} {self.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(self.body)}\r\n\r\n"
        return (head + kind).encode() + self.body


class Cost(NamedTuple):
    status: int
    sent_bytes: int
    answer_bytes: int
    cpu_s: float
    piece_s: float
    memory_bytes: int


def full_of(item: bytes, num_bytes: int = BODY_BYTES, separator: bytes = b",") -> bytes:
    return separator.join([item] * (num_bytes // (len(item) + len(separator))))


def items(item: bytes, num_bytes: int = BODY_BYTES) -> bytes:
    return b"[" + full_of(item, num_bytes) + b"]"


def as_json(**body: Any) -> bytes:
    return json.dumps(body).encode()


def field_shapes() -> Iterator[Shape]:
    """Every field of each body that may hold a list or anything at all."""
    for path, base in (
        (COMPLETIONS, b'"prompt":"x","max_tokens":1'),
        (CHAT, b'"messages":[{"role":"user","content":"x"}],"max_tokens":1'),
        (GENERATE, b'"text":"x"'),
    ):
        names = {COMPLETIONS: "user", CHAT: "tools", GENERATE: "image_data"}
        for item in (b"[]", b'{"a":1}', b"1", b"1.5", b'""'):
            field = b'"%b":%b' % (names[path].encode(), items(item))
            yield Shape(f"{names[path]}: [{item.decode()}, ...]", path, b"{%b,%b}" % (base, field))
        yield Shape("unknown field: [[], ...]", path, b'{%b,"unheard_of":%b}' % (base, items(b"[]")))
        stops = b'"sampling_params":{"stop_token_ids":%b}' if path == GENERATE else b'"stop_token_ids":%b'
        yield Shape("stop_token_ids: [1, ...]", path, b"{%b,%b}" % (base, stops % items(b"1")))
    pairs = b",".join(b'"%d":1' % number for number in range(600_000))
    yield Shape("logit_bias of 600,000", COMPLETIONS, b'{"prompt":"x","logit_bias":{%b}}' % pairs)
    yield Shape(
        "just below 128 KiB: [[1], ...]", COMPLETIONS, b'{"prompt":%b}' % items(b"[1]", (128 << 10) - 64)
    )
    part = b'{"messages":[{"role":"user","content":%b}],"max_tokens":1}'
    for path, body in ((CHAT, part), (RESPONSES, b'{"input":%b}')):
        label = "just below 128 KiB: unknown fields in many objects"
        yield Shape(label, path, body % items(b'{"a":0}', (128 << 10) - 128))
    yield Shape("whitespace", COMPLETIONS, b'{"prompt":' + b" " * BODY_BYTES + b'"x"}')
    yield Shape("not JSON", COMPLETIONS, b"[" * BODY_BYTES)
    yield Shape("many fields", COMPLETIONS, b'{"prompt":"x",%b}' % full_of(b'"n":1'))
    yield Shape("a name of 8 MiB", COMPLETIONS, b'{"%b":1}' % (b"n" * BODY_BYTES))
    yield Shape("user: a text", COMPLETIONS, b'{"prompt":"x","user":"%b"}' % (b"n" * BODY_BYTES))


def prompt_shapes() -> Iterator[Shape]:
    texts = {COMPLETIONS: "prompt", GENERATE: "text", "/v1/embeddings": "input", "/tokenize": "prompt"}
    for path, name in texts.items():
        for label, value in (
            ("one text", b'"' + b"x" * BODY_BYTES + b'"'),
            ("a text of escapes", b'"' + b"\\n" * (BODY_BYTES // 2) + b'"'),
            ("64 texts", b"[" + b",".join([b'"%b"' % (b"x" * (BODY_BYTES // 70))] * 64) + b"]"),
            ("texts of one character", items(b'"a"')),
            ("a text of é", '"{}"'.format("é" * (BODY_BYTES // 2)).encode()),
            ("a text of one emoji after a's", '"{}😀"'.format("a" * BODY_BYTES).encode()),
            ("a text of emojis", '"{}"'.format("😀" * (BODY_BYTES // 4)).encode()),
            ("a text of escaped emojis", b'"' + b"\\ud83d\\ude00" * (BODY_BYTES // 12) + b'"'),
            ("a text of backslashes", b'"' + b"\\\\" * (BODY_BYTES // 2) + b'"'),
            ("whitespace behind it", b'"x"' + b"\n" * BODY_BYTES),
        ):
            yield Shape(f"{name}: {label}", path, b'{"%b":%b}' % (name.encode(), value))
    for path, name in ((COMPLETIONS, "prompt"), (GENERATE, "input_ids"), ("/detokenize", "tokens")):
        lists = b",".join([b"[" + full_of(b"123", 60_000) + b"]"] * 64)
        for label, value in (
            ("ids", items(b"1")),
            ("lists of one id", items(b"[1]")),
            ("64 lists of 15,000 ids", b"[" + lists + b"]"),
            ("ids and a text", b"[" + full_of(b"1") + b',"a"]'),
        ):
            yield Shape(f"{name}: {label}", path, b'{"%b":%b}' % (name.encode(), value))
    message = b'{"role":"user","content":"%b"}'
    for label, value in (
        ("8 MiB of one", message % (b"x" * BODY_BYTES)),
        ("4,096", full_of(message % (b"x" * 1900), 4096 * 1930)),
        ("300,000", full_of(message % b"")),
        ("parts", b'{"role":"user","content":[%b]}' % full_of(b'{"type":"text","text":"x"}')),
        ("tool_calls: [[], ...]", b'{"role":"user","tool_calls":%b}' % items(b"[]")),
    ):
        yield Shape(f"messages: {label}", CHAT, b'{"messages":[%b]}' % value)
    yield Shape("messages: 4,096", "/tokenize", b'{"messages":[%b]}' % full_of(message % b"x", 4096 * 31))


def message_shapes() -> Iterator[Shape]:
    """Shapes of Anthropic's Messages API, which has more kinds of lists."""
    body = b'{"model":"default","max_tokens":1,"messages":[{"role":"%b","content":%b}%b]}'
    text = b'{"type":"text","text":"%b"}'
    use = b'{"type":"tool_use","id":"a","name":"f","input":%b}'
    answered = b',{"role":"user","content":"x"}'
    for label, role, content, last in (
        ("8 MiB of one text", b"user", b"[" + text % (b"x" * BODY_BYTES) + b"]", b""),
        ("300,000 blocks", b"user", items(text % b"x"), b""),
        ("4,000 texts of an answer", b"assistant", items(text % (b"x" * 2000), 4000 * 2028), answered),
        ("2,500 calls", b"assistant", items(use % b"{}", 2500 * 52), answered),
        ("input: [[], ...]", b"assistant", b"[" + use % items(b"[]") + b"]", answered),
        ("results of blocks", b"user", b'[{"type":"tool_result","content":%b}]' % items(text % b"x"), b""),
        ("cache_control: [[], ...]", b"user", b'[{"cache_control":%b}]' % items(b"[]"), b""),
    ):
        yield Shape(f"content: {label}", MESSAGES, body % (role, content, last))
    more = b'{"model":"default","max_tokens":1,"messages":[{"role":"user","content":"x"}],"%b":%b}'
    definition = b'{"name":"f","input_schema":{"a":%b}}'
    for name, label, value in (
        (b"system", "300,000 blocks", items(text % b"x")),
        (b"tools", "definitions", items(definition % b"{}")),
        (b"tools", "1 MiB of one", b"[" + definition % items(b'"x"', (1 << 20) - 64) + b"]"),
        (b"metadata", "[[], ...]", items(b"[]")),
    ):
        yield Shape(f"{name.decode()}: {label}", MESSAGES, more % (name, value))
    count = b'{"messages":[{"role":"user","content":"%b"}]}' % (b"x " * (64 << 10))
    yield Shape("content: 128 KiB", f"{MESSAGES}/count_tokens", count)


def response_shapes() -> Iterator[Shape]:
    """Shapes of OpenAI's Responses API, whose items become messages."""
    body = b'{"max_output_tokens":1,"input":%b}'
    message = b'{"role":"%b","content":%b}'
    text = b'{"type":"input_text","text":"%b"}'
    call = b'{"type":"function_call","call_id":"a","name":"f","arguments":"%b"}'
    said, long = message % (b"assistant", b'"x"'), message % (b"user", b'"%b"' % (b"x" * 1900))
    one_call = b"[" + call % full_of(b"[]", (1 << 20) - 64) + b"]"
    for label, value in (
        ("8 MiB of one text", b'"' + b"x" * BODY_BYTES + b'"'),
        ("ids", items(b"1")),
        ("300,000 items", items(said)),
        ("4,000 items", items(long, 4000 * (len(long) + 1))),
        ("4,000 turns of an answer", items(said, 4000 * (len(said) + 1))),
        ("2,500 calls", items(call % b"{}", 2500 * (len(call) + 1))),
        ("a call of [[], ...]", one_call),
        ("content: 300,000 parts", b"[" + message % (b"user", items(text % b"x")) + b"]"),
        ("content: [{}, ...]", b"[" + message % (b"user", items(b"{}")) + b"]"),
        (
            "content: 4,000 texts",
            b"[" + message % (b"user", items(text % (b"x" * 1900), 4000 * (len(text) + 1899))) + b"]",
        ),
        ("output: 300,000 parts", b'[{"call_id":"a","output":%b}]' % items(text % b"x")),
        ("summary: [[], ...]", b'[{"type":"reasoning","summary":%b}]' % items(b"[]")),
    ):
        yield Shape(f"input: {label}", RESPONSES, body % value)
    more = b'{"max_output_tokens":1,"input":"x","%b":%b}'
    definition = b'{"type":"function","name":"f","parameters":{"a":%b}}'
    for name, label, value in (
        (b"instructions", "8 MiB", b'"' + b"x" * BODY_BYTES + b'"'),
        (b"tools", "definitions", items(definition % b"{}")),
        (b"tools", "1 MiB of one", b"[" + definition % items(b'"x"', (1 << 20) - 128) + b"]"),
        (b"metadata", "[[], ...]", items(b"[]")),
    ):
        yield Shape(f"{name.decode()}: {label}", RESPONSES, more % (name, value))


def crowd_shapes() -> Iterator[Shape]:
    """Requests for many sequences, prompts or calls."""
    user = [{"role": "user", "content": "x"}]
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    for stream in (False, True):
        how = "stream" if stream else "whole"
        many = {"n": 128, "max_tokens": 90, "logprobs": True, "top_logprobs": 20, "stream": stream}
        yield Shape(f"n 128 with 20 logprobs, {how}", CHAT, as_json(messages=user, **many))
        calls = {"n": 128, "max_tokens": 2000, "tools": tools, "stream": stream}
        yield Shape(f"n 128 with calls, {how}", CHAT, as_json(messages=user, **calls))
        body = as_json(prompt=["x"] * 1024, max_tokens=1, logprobs=5, echo=True, stream=stream)
        yield Shape(f"1,024 prompts with echo and logprobs, {how}", COMPLETIONS, body)
        body = as_json(prompt=["x"] * 8, n=128, max_tokens=16, stream=stream)
        yield Shape(f"8 prompts with n 128, {how}", COMPLETIONS, body)
        yield Shape(f"1,024 texts, {how}", GENERATE, as_json(text=["x"] * 1024, stream=stream))
    for path in ("/v1/models", "/openapi.json"):
        yield Shape("GET", path, b"")


def answer_shapes() -> Iterator[Shape]:
    """Requests of few bytes for much."""
    sampling = {"max_new_tokens": 12_000, "ignore_eos": True}
    logprobs = {"return_logprob": True, "top_logprobs_num": 20, "sampling_params": sampling}
    for stream in (False, True):
        how = "stream" if stream else "whole"
        yield Shape(
            f"12,000 tokens with 20 logprobs, {how}", GENERATE, as_json(text="x", stream=stream, **logprobs)
        )
        yield Shape(
            f"12,000 tokens with 20 logprobs, {how}",
            COMPLETIONS,
            as_json(prompt="x", max_tokens=12_000, logprobs=20, stream=stream),
        )
        chat = {"max_tokens": 12_000, "logprobs": True, "top_logprobs": 20, "stream": stream}
        messages = [{"role": "user", "content": "x"}]
        yield Shape(f"12,000 tokens with 20 logprobs, {how}", CHAT, as_json(messages=messages, **chat))
        items_of = {"max_output_tokens": 12_000, "include": [LOGPROBS], "top_logprobs": 20, "stream": stream}
        yield Shape(f"12,000 tokens with 20 logprobs, {how}", RESPONSES, as_json(input="x", **items_of))
        ids = [5] * 12_000
        shown = {**logprobs, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
        body = as_json(input_ids=ids, stream=stream, **shown)
        yield Shape(f"logprobs of a prompt of 12,000, {how}", GENERATE, body)
        yield Shape(
            f"echo with logprobs of 12,000, {how}",
            COMPLETIONS,
            as_json(prompt=ids, max_tokens=1, logprobs=20, echo=True, stream=stream),
        )
    body = as_json(prompt=[5] * 12_000, max_tokens=1, prompt_logprobs=20)
    yield Shape("prompt_logprobs of 12,000", COMPLETIONS, body)
    body = as_json(prompt=[5] * 12_000, max_tokens=1, prompt_logprobs=20, logprobs=0, echo=True)
    yield Shape("prompt_logprobs and echo of 12,000", COMPLETIONS, body)
    yield Shape("token_strs of 128 KiB", "/tokenize", as_json(prompt="ab " * 43_000, return_token_strs=True))
    yield Shape("65,536 ids", "/detokenize", as_json(tokens=[5] * 65_536))


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """12,000 tokens where many are asked for, 100 at a time; logprobs of all of a prompt of ids."""
    asked = request.sampling.max_tokens or 1
    first: dict[str, Any] = {}
    if request.sampling.prompt_logprobs is not None and request.input_ids:
        count = len(request.input_ids) // 4 - 1
        tops = {"prompt_top_ids": pack_ids([5] * (20 * count)), "prompt_top_logprobs": values(20 * count)}
        first = {"prompt_logprobs": values(count), "prompt_ranks": pack_ids([21] * count), **tops}
    parts = [SequenceOutput(request.handle, "", **first)] if first else []
    ends = []
    for index in range(request.sampling.n):
        parts += text_of_calls(request, index) if request.tools else tokens(request, index, asked)
        ends.append(SequenceOutput(sibling(request.handle, index), finish=finish("length", asked)))
    return parts + ends


def tokens(request: GenerateRequest, index: int, asked: int) -> list[SequenceOutput]:
    """So many tokens of one sequence, 100 at a time in a stream, with the logprobs that are asked for."""
    num_top = request.sampling.logprobs
    step, parts = 100 if request.stream else asked, []
    for start in range(0, asked, step):
        count = min(step, asked - start)
        fields: dict[str, Any] = {}
        if num_top is not None:
            top_ids = pack_ids([5] * (num_top * count))
            fields = {"logprobs": values(count), "top_ids": top_ids, "top_logprobs": values(num_top * count)}
        ids = pack_ids([5] * count)
        parts.append(output(request, "x" * count, index=index, token_ids=ids, **fields))
    return parts


def text_of_calls(request: GenerateRequest, index: int) -> list[SequenceOutput]:
    """150 calls of one sequence, all that came while its caller did not read."""
    return [output(request, CALL * 150, index=index, token_ids=pack_ids([5] * 150))]


def values(count: int) -> bytes:
    return np.full(count, -0.5, np.float32).tobytes()


class TimedLoop:
    """asyncio in uvloop's place, with the longest of its callbacks by CPU time of the thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def run(self, main: Any) -> None:
        run_callback = asyncio.events.Handle._run
        thread = threading.get_ident()

        def timed(handle: asyncio.events.Handle) -> None:
            if threading.get_ident() != thread:
                run_callback(handle)
                return
            began_s = time.thread_time()
            run_callback(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)

        asyncio.events.Handle._run = timed  # type: ignore[method-assign, assignment]
        try:
            asyncio.run(main)
        finally:
            asyncio.events.Handle._run = run_callback  # type: ignore[method-assign]


def measure(front: Front, loop: TimedLoop, shape: Shape) -> Cost:
    """The best of a few: what other work disturbs makes only longer."""
    request, costs = shape.request(), list[Cost]()
    for _ in range(REPEATS):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before_bytes, loop.longest_s = resident("VmRSS"), 0.0
        own_s, process_s = time.thread_time(), time.process_time()
        status, answer_bytes = exchange(front, request)
        cpu_s = time.process_time() - process_s - (time.thread_time() - own_s)
        grown = resident("VmHWM") - before_bytes - answer_bytes
        costs.append(Cost(status, len(request), answer_bytes, cpu_s, loop.longest_s, max(0, grown)))
    return costs[0]._replace(
        cpu_s=min(cost.cpu_s for cost in costs),
        piece_s=min(cost.piece_s for cost in costs),
        memory_bytes=min(cost.memory_bytes for cost in costs),
    )


def exchange(front: Front, request: bytes) -> tuple[int, int]:
    """(status, bytes of the answer), which are not kept."""
    with front.connect() as connection:
        connection.settimeout(120.0)
        connection.sendall(request)
        head = connection.recv(1 << 16)
        size = len(head)
        while part := connection.recv(1 << 18):
            size += len(part)
    return int(head.split()[1]), size


def resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@contextmanager
def measured_front() -> Iterator[tuple[Front, TimedLoop]]:
    loop = TimedLoop()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.harness.http.http_front.uvloop", loop)
        with http_front(Path(folder), answer, **SETTINGS) as front:
            front.post("/tokenize", prompt="x")  # loads the tokenizer
            collect_new_objects_alone()  # as the process does that serves
            yield front, loop


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*", help="text in the path or the name of the shapes to measure")
    texts = parser.parse_args().text
    makers = (field_shapes, prompt_shapes, message_shapes, response_shapes, crowd_shapes, answer_shapes)
    shapes = [
        shape
        for shape in chain.from_iterable(make() for make in makers)
        if not texts or any(text in f"{shape.path} {shape.name}" for text in texts)
    ]
    table: list[dict[str, Any]] = []
    print(
        "| path | shape | status | sent MiB | CPU ms | CPU s per MiB sent | longest piece ms | memory MiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with measured_front() as (front, loop):
        for shape in shapes:
            cost = measure(front, loop, shape)
            sent = cost.sent_bytes / (1 << 20)
            print(
                f"| {shape.path} | {shape.name} | {cost.status} | {sent:.3f} | {1e3 * cost.cpu_s:.0f} | "
                f"{cost.cpu_s / sent:.3f} | {1e3 * cost.piece_s:.1f} | {cost.memory_bytes / (1 << 20):.0f} |",
                flush=True,
            )
            table.append({"path": shape.path, "shape": shape.name, **cost._asdict()})
    above = [row for row in table if row["piece_s"] > MAX_PIECE_S or row["memory_bytes"] > MAX_MEMORY_BYTES]
    print(json.dumps({"shapes": len(table), "above": above}))


if __name__ == "__main__":
    main()
