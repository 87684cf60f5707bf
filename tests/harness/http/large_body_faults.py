"""Page faults of a large body: `python -m tests.harness.http.large_body_faults` reads a body of 8 MiB like
the HTTP process, and prints the maximum number of memory pages that the kernel gave it in one turn of the
event loop.
"""

from __future__ import annotations

import asyncio
import resource
from types import SimpleNamespace
from typing import Any

from carousel.server.http.body_pool import MAX_BODY_BYTES, BodyPool
from carousel.server.main import return_large_blocks
from carousel.server.request.body import _read_bytes

PART_BYTES = 64 << 10
ROUNDS = 3
"""In the first one the heap grows to what it needs."""


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


async def most_in_a_turn() -> int:
    part, turns = b"x" * PART_BYTES, list[int]()
    num_left, faults_before = MAX_BODY_BYTES // PART_BYTES, 0

    async def receive() -> dict[str, Any]:
        nonlocal num_left, faults_before
        if faults_before:
            turns.append(num_faults() - faults_before)
        num_left -= 1
        faults_before = num_faults()
        return {"type": "http.request", "body": part, "more_body": num_left > 0}

    state = {"has_whole_body": lambda: False}
    scope = {"headers": [(b"content-type", b"application/json")], "state": state}
    request: Any = SimpleNamespace(scope=scope, receive=receive)
    share = BodyPool(lambda: False).share("")
    assert len(await _read_bytes(request, share)) == MAX_BODY_BYTES
    turns.append(num_faults() - faults_before)
    return max(turns)


def main() -> None:
    return_large_blocks()
    print(min([asyncio.run(most_in_a_turn()) for _ in range(ROUNDS)][1:]))


if __name__ == "__main__":
    main()
