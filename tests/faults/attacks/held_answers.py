"""Memory of the HTTP process for answers that nobody reads: `python -m tests.faults.attacks.held_answers
[NAME ...]` asks for 16 of the largest answers of each kind, reads nothing of them, and notes by how much the
process has grown. Where an event at the end of a stream repeats all of it, callers read up to there.

The server is the real one, over a fake ring that answers at once, in the same process, which is a new one for
each row. CPU seconds are those of an answer that is read.
"""

from __future__ import annotations

import ctypes
import gc
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from runtime.wire.format import TOKEN_BYTES, pack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.faults.attacks.request_shapes import resident
from tests.harness.http.http_front import Front, http_front, raw_request
from tests.harness.ring.fake_ring import finish, output

NUM_CALLERS = 16
NUM_TOKENS = 12_000
NUM_TOP = 20
CONTEXT = 16_384
HELD_S = 4.0
"""Less than the time after which they are closed."""
STEP = 100
VOCAB = 1000

PROMPT = [5] * NUM_TOKENS
MESSAGES = [{"role": "user", "content": "x"}]
LOGPROBS = ["message.output_text.logprobs"]
GENERATE = {
    "return_logprob": True,
    "top_logprobs_num": NUM_TOP,
    "sampling_params": {"max_new_tokens": NUM_TOKENS},
}
FROM_START = {"logprob_start_len": 0, "return_text_in_logprobs": True}
LAST_EVENTS = {"response": b"response.output_text.done"}
"""By shape: an event from which on a stream repeats what it had."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", {"prompt": "x", "max_tokens": NUM_TOKENS}),
    "response": (
        "/v1/responses",
        {"input": "x", "max_output_tokens": NUM_TOKENS, "include": LOGPROBS, "top_logprobs": NUM_TOP},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "logprobs": True, "top_logprobs": NUM_TOP},
    ),
    "chat, n 12": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 1000, "n": 12, "logprobs": True, "top_logprobs": NUM_TOP},
    ),
    "completion": ("/v1/completions", {"prompt": "x", "max_tokens": NUM_TOKENS, "logprobs": NUM_TOP}),
    "echo": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "logprobs": NUM_TOP, "echo": True}),
    "generate": ("/generate", {"text": "x", **GENERATE}),
    "generate, both": ("/generate", {"input_ids": PROMPT[:4000], **GENERATE, **FROM_START}),
}


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Return as many tokens as are asked for, STEP at a time, and logprobs that are all different."""
    rng = np.random.default_rng(3)
    sampling, asked = request.sampling, request.sampling.max_tokens or 1

    def ids(count: int) -> bytes:
        return pack_ids(rng.integers(5, VOCAB, count))

    def values(count: int) -> bytes:
        return (-20 * rng.random(count)).astype(np.float32).tobytes()

    parts: list[SequenceOutput] = []
    if sampling.prompt_logprobs is not None:
        num, num_top = len(request.input_ids or b"") // TOKEN_BYTES - 1, sampling.prompt_logprobs
        parts.append(
            SequenceOutput(
                request.handle,
                prompt_logprobs=values(num),
                prompt_ranks=ids(num),
                prompt_top_ids=ids(num_top * num),
                prompt_top_logprobs=values(num_top * num),
            )
        )
    for index in range(sampling.n):
        for start in range(0, asked, STEP):
            count, fields = min(STEP, asked - start), dict[str, Any]()
            if (most := sampling.logprobs) is not None:
                fields = {
                    "logprobs": values(count),
                    "top_ids": ids(most * count),
                    "top_logprobs": values(most * count),
                }
            parts.append(output(request, "x" * count, index=index, token_ids=ids(count), **fields))
        parts.append(output(request, "", index=index, finish=finish("length", asked)))
    return parts


def grown_mb(front: Front, data: bytes, until: bytes) -> float:
    """The most by which the process grows while callers who ask for this read nothing, or no more once
    `until` has come.
    """
    with ExitStack() as stack:
        _give_back()
        before = resident("VmRSS")
        callers: list[socket.socket] = []
        for _ in range(NUM_CALLERS):
            caller = stack.enter_context(socket.socket())
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.connect(("127.0.0.1", front.port))
            caller.sendall(data)
            callers.append(caller)
        if until:
            for caller in callers:
                last = b""
                while until not in last and (part := caller.recv(1 << 16)):
                    last = last[-len(until) :] + part
        time.sleep(HELD_S)
        _give_back()
        grown = resident("VmRSS") - before
    return grown / (1 << 20)


def _give_back() -> None:
    """Give freed memory back, also that of the fake ring."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def read(front: Front, data: bytes) -> tuple[int, float]:
    """(bytes of the answer, CPU seconds until it was read)."""
    process_s, own_s = time.process_time(), time.thread_time()
    size = 0
    with front.connect() as connection:
        connection.settimeout(120.0)
        connection.sendall(data)
        while part := connection.recv(1 << 18):
            size += len(part)
    return size, time.process_time() - process_s - (time.thread_time() - own_s)


def row(name: str, *, is_stream: bool) -> str:
    path, body = SHAPES[name]
    data = raw_request(path, headers="Connection: close\r\n", stream=is_stream, **body)
    until = LAST_EVENTS.get(name, b"") if is_stream else b""
    with (
        tempfile.TemporaryDirectory() as folder,
        http_front(Path(folder), answer, context_length=CONTEXT) as front,
    ):
        size, cpu_s = min((read(front, data) for _ in range(2)), key=lambda each: each[1])
        grown = grown_mb(front, data, until)
    how = "stream" if is_stream else "whole"
    return f"| {name}, {how} | {size / (1 << 20):.1f} | {cpu_s:.2f} | {grown:.0f} |"


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"answers to measure: {', '.join(SHAPES)}")
    parser.add_argument("--row", choices=("whole", "stream"), help="print the row of the only answer named")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in SHAPES]:
        parser.error(f"there is no answer {unknown[0]!r}; there are {', '.join(SHAPES)}")
    if asked.row:
        if len(asked.names) != 1:
            parser.error("--row is for one answer")
        print(row(asked.names[0], is_stream=asked.row == "stream"))
        return
    print("| answer | MB as it is read | CPU s | growth by 16 of them, MB |\n|---|---|---|---|", flush=True)
    for name in asked.names or SHAPES:
        for how in ("whole", "stream"):
            command = [sys.executable, "-m", "tests.faults.attacks.held_answers", name, "--row", how]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
