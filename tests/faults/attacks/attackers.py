"""Attackers: `python -m tests.faults.attacks.attackers NAME PORT SECONDS CONNECTIONS` sends one kind of bytes
on NUM_CONNECTIONS connections for so long, or until it has opened so many, at the lowest priority. Prints how
many it opened, the bytes it sent and the statuses that it was answered with, as JSON.

They have no key, or that of the environment's ATTACKERS_KEY in all but what asks for /live, which needs none,
and the heads of a grammar. With a certificate in the environment's ATTACKERS_TRUST they speak TLS.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any

from tests.faults.attacks.attack import (
    BODY_BYTES,
    CHUNKED,
    FULL_HEAD,
    HALF_BODY,
    HELD_S,
    LIVE,
    MANY_CONNECTIONS,
    MANY_FIELDS,
    NUM_CONNECTIONS,
    OPENAPI,
    OTHER_ADDRESS,
    PIECE_BYTES,
    UPGRADE,
    Attack,
    body_of,
    endless,
)
from tests.faults.attacks.door_attackers import DOOR_KINDS
from tests.faults.attacks.tls_attackers import TLS_KINDS
from tests.harness.http.http_grammar import make_stream

NICE = 19


def take_lowest_priority() -> None:
    """Give this process way to all others. Where the kernel shares cores between sessions, niceness means
    nothing beside processes of another one: so it gets a session of its own, which is nice, too.
    """
    os.nice(NICE)
    with suppress(OSError):  # it leads a session, or there is no such sharing
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(NICE))


def filled(head: bytes, item: bytes, tail: bytes) -> bytes:
    """A request with a body of the largest size: `head`, then `item` again and again, then `tail`."""
    return body_of(head + item * ((BODY_BYTES - len(head) - len(tail)) // len(item)) + tail)


LARGE = (
    filled(b'{"prompt":"x","user":[[]', b",[]", b"]}"),
    filled(b'{"prompt":[1', b",1", b"]}"),
    filled(b'{"prompt":[[1]', b",[1]", b"]}"),
    filled(b'{"prompt":"', b"\\n", b'"}'),
    filled(b'{"prompt":["a"', b',"a"', b"]}"),
    filled(b'{"prompt":', b" ", b'"x"}'),
    filled(b'{"prompt":"', b"word ", b'"}'),
    filled(b"", b"[", b""),
)
SHAPES = cycle(LARGE)
NUM_PIPELINED = 8000


def trailers(attack: Attack, _: int) -> None:
    attack.send(endless(CHUNKED + b"0\r\n", b"a: b\r\n" * 11_000))


def one_trailer(attack: Attack, _: int) -> None:
    attack.send(endless(CHUNKED + b"0\r\na: ", b"z" * PIECE_BYTES))


def pipelines(attack: Attack, _: int) -> None:
    attack.send(endless(LIVE * NUM_PIPELINED))


def unread_pipelines(attack: Attack, _: int) -> None:
    """Answers of 100 KB that nobody reads."""
    attack.send(endless(OPENAPI * 16), reads=False)


def bursts(attack: Attack, _: int) -> None:
    """Send as many requests as a connection may have waiting, all of which are answered."""
    attack.send(endless(LIVE * 16))


def half_bodies(attack: Attack, _: int) -> None:
    """All of a body but its last bytes, which never come."""
    attack.send(iter([HALF_BODY]), stays_s=HELD_S)


def large_bodies(attack: Attack, _: int) -> None:
    attack.send(iter([next(SHAPES)]), stays_s=HELD_S)


def small_chunks(attack: Attack, _: int) -> None:
    """Send as much framing as a body may have."""
    attack.send(endless(CHUNKED, b"8\r\nxxxxxxxx\r\n" * 10_000))


def heads(attack: Attack, number: int) -> None:
    """Heads of the largest size, of the most fields, and some that ask for another protocol."""
    attack.send(endless((FULL_HEAD, MANY_FIELDS, UPGRADE)[number % 3] * 16))


def slow_heads(attack: Attack, _: int) -> None:
    """A byte at a time."""

    def drip() -> Iterator[bytes]:
        for at in range(len(FULL_HEAD)):
            time.sleep(0.001)
            yield FULL_HEAD[at : at + 1]

    attack.send(drip(), stays_s=HELD_S)


def connects(attack: Attack, number: int) -> None:
    """Connections that end at once, every second one by a reset: more than the server accepts. They come from
    an address of their own, since they need all of its ports.
    """
    with attack.open(address=OTHER_ADDRESS) as connection:
        if number % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def leavers(attack: Attack, _: int) -> None:
    """Requests whose callers leave without their answers."""
    attack.send(iter([LIVE]))


def noise(attack: Attack, number: int) -> None:
    attack.send(endless(random.Random(number + attack.num_opened).randbytes(PIECE_BYTES)))


SEEDS = count()
ANSWER_S = 0.03
"""Longest silence after which no more is expected of a connection that the server keeps."""


def grammar(attack: Attack, _: int) -> None:
    """Requests with every framing, right and wrong (`tests/harness/http/http_grammar.py`)."""
    pieces = make_stream(next(SEEDS)).pieces
    attack.send(iter([b"".join(piece for piece, _ in pieces)]), stays_s=ANSWER_S)


def as_json(**body: Any) -> bytes:
    return json.dumps(body).encode()


LONG_TEXT = body_of(as_json(prompt="ab " * 40_000, return_token_strs=True), b"/tokenize")
LONG_ANSWER = body_of(
    as_json(
        input_ids=[[7 + number % 61 for number in range(1000)]] * 12,
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=20,
        return_text_in_logprobs=True,
    ),
    b"/generate",
)
MANY_LOGPROBS = body_of(
    as_json(
        input_ids=[7 + number % 61 for number in range(1000)],
        sampling_params={"max_new_tokens": 200, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=20,
        stream=True,
    ),
    b"/generate",
)
LONG_STOPS = body_of(
    as_json(
        prompt="x",
        max_tokens=400,
        ignore_eos=True,
        stream=True,
        stop=["A" * length + "b" for length in range(240, 256)],
    )
)


def texts(attack: Attack, _: int) -> None:
    """Ask /tokenize for tokens and their spellings."""
    attack.send(iter([LONG_TEXT]), stays_s=HELD_S)


def cut_prompts(attack: Attack, _: int) -> None:
    """Ask for the last tokens of a text of 8 MiB."""
    attack.send(
        iter([filled(b'{"truncate_prompt_tokens":100,"max_tokens":400,"prompt":"', b"word ", b'"}')]),
        stays_s=HELD_S,
    )


def logprob_streams(attack: Attack, _: int) -> None:
    """Stream with the logprobs of the prompt and of each token, 20 of them."""
    attack.send(iter([MANY_LOGPROBS]), stays_s=HELD_S)


def unread_answers(attack: Attack, _: int) -> None:
    """Ask for the logprobs of 12,000 tokens, 20 of each, and do not read them."""
    attack.send(iter([LONG_ANSWER]), reads=False, stays_s=HELD_S)


def stop_strings(attack: Attack, _: int) -> None:
    """Stream with stop strings that begin as the text goes on, to their last character."""
    attack.send(iter([LONG_STOPS]), stays_s=HELD_S)


KINDS: tuple[Callable[[Attack, int], None], ...] = (
    trailers,
    one_trailer,
    pipelines,
    unread_pipelines,
    bursts,
    half_bodies,
    large_bodies,
    small_chunks,
    heads,
    slow_heads,
    connects,
    leavers,
    noise,
    grammar,
    texts,
    cut_prompts,
    logprob_streams,
    unread_answers,
    stop_strings,
    *DOOR_KINDS,
)
ATTACKS: dict[str, tuple[Callable[[Attack, int], None], int]] = {
    **{kind.__name__: (kind, NUM_CONNECTIONS) for kind in KINDS},
    "many_half_bodies": (half_bodies, MANY_CONNECTIONS),
}
TLS_ATTACKS = {
    name: (kind, MANY_CONNECTIONS if name.startswith("many_") else NUM_CONNECTIONS)
    for name, kind in TLS_KINDS.items()
}
"""By name: what one connection does, and on how many."""


def run(name: str, port: int, seconds: float, most_opened: int) -> Attack:
    do, num_connections = (ATTACKS | TLS_ATTACKS)[name]
    attack = Attack(port, seconds, most_opened)

    def repeat(number: int) -> None:
        while not attack.is_over:
            try:
                do(attack, number)
            except OSError:
                attack.statuses["closed"] += 1

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(num_connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return attack


def main() -> None:
    name, port, seconds, most_opened = sys.argv[1:]
    take_lowest_priority()
    attack = run(name, int(port), float(seconds), int(most_opened))
    sent = round(attack.num_bytes / (1 << 20))
    print(json.dumps({"opened": attack.num_opened, "sent_mib": sent, "statuses": dict(attack.statuses)}))


if __name__ == "__main__":
    main()
