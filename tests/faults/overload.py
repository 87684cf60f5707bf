"""Ten times as many requests as a launch can serve: `python -m tests.faults.overload --seconds 60` prints how
much of its capacity is still served, how fast the others are refused, and what that costs in memory.

The worker sleeps (`tests/harness/ring/sleeping_worker.py`), so the capacity is known and the cores are there
for the load. With `--model` it is the demo model, whose capacity is what it serves before the overload;
callers, server and model then share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from runtime.ring.endpoints import Endpoints
from runtime.wire.status_page import StatusPage
from tests.harness.ring.launched import Launched, launched
from tests.harness.ring.resources import memory_mb
from tests.harness.ring.sleeping_worker import STEP_S

ROWS = 16
QUEUE = 32
MAX_TOKENS = 20
CAPACITY = ROWS / (MAX_TOKENS * STEP_S)
"""Requests a second, were every row always taken."""
SETTINGS = (
    f"--max-running-requests={ROWS}",
    f"--max-queued-requests={QUEUE}",
    "--log-level=warning",
)
MODEL_MAX_TOKENS = 300
"""Tokens of the demo model's answers: many, so that ten times its capacity does not need fast callers."""


def request_for(max_tokens: int) -> bytes:
    body = json.dumps(
        {"model": "carousel-demo", "prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
    ).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    return head + body


@dataclass(slots=True)
class Answers:
    statuses: Counter[int] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    """Seconds that each refusal took."""
    without_retry_after: int = 0
    ended_at: list[float] = field(default_factory=list)
    """When each good answer came."""

    def rate(self, begin: float, end: float) -> float:
        """Good answers a second."""
        return sum(begin <= at < end for at in self.ended_at) / (end - begin)


async def ask(port: int, request: bytes, answers: Answers) -> None:
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    received = await reader.read(-1)
    writer.close()
    now = time.monotonic()
    head = received.partition(b"\r\n\r\n")[0].lower()
    status = int(head.split()[1])
    answers.statuses[status] += 1
    if status == 200:
        answers.ended_at.append(now)
    else:
        answers.refused_s.append(now - began)
        answers.without_retry_after += b"retry-after: " not in head


async def closed_loop(port: int, request: bytes, seconds: float) -> Answers:
    """Ask by as many callers as rows and half as many again: the unloaded capacity."""
    answers, end = Answers(), time.monotonic() + seconds

    async def repeat() -> None:
        while time.monotonic() < end:
            await ask(port, request, answers)

    await asyncio.gather(*(repeat() for _ in range(ROWS + ROWS // 2)))
    return answers


async def open_loop(port: int, request: bytes, seconds: float, per_second: float) -> Answers:
    """Requests at a fixed rate, whatever becomes of them."""
    answers, asking = Answers(), set()
    began = time.monotonic()
    for number in range(int(seconds * per_second)):
        await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
        task = asyncio.create_task(ask(port, request, answers))
        asking.add(task)
        task.add_done_callback(asking.discard)
    await asyncio.gather(*asking)
    return answers


def num_steps(launch: Launched) -> int:
    """Return how many steps the launch has computed."""
    page = StatusPage(Endpoints(launch.run_dir).status_file)
    try:
        return page.read("scheduler").num_finished
    finally:
        page.close()


def measure(
    launch: Launched, seconds: float, factor: float, max_tokens: int = MAX_TOKENS, capacity: float = CAPACITY
) -> dict[str, Any]:
    """Unloaded for some time, then overloaded; of the rates the first second of each is left out. capacity:
    requests a second; 0 for what is served unloaded. `rows_used` of the report is the share of the rows of
    all overloaded steps that gave a token of an answer.
    """
    port, request = launch.state()["port"], request_for(max_tokens)
    began = time.monotonic()
    unloaded = asyncio.run(closed_loop(port, request, seconds / 2)).rate(began + 1.0, began + seconds / 2)
    capacity = capacity or unloaded
    before, steps_before = memory_mb(launch.pids()), num_steps(launch)
    began = time.monotonic()
    answers = asyncio.run(open_loop(port, request, seconds, factor * capacity))
    places = (num_steps(launch) - steps_before) * ROWS
    growth = {pid: mb - before[pid] for pid, mb in memory_mb(launch.pids()).items()}
    refused = sorted(answers.refused_s)
    return {
        "capacity": round(capacity, 2),
        "unloaded_per_s": round(unloaded, 2),
        "goodput_per_s": round(answers.rate(began + 1.0, began + seconds), 2),
        "rows_used": round(answers.statuses[200] * max_tokens / places, 2),
        "offered_per_s": round(factor * capacity, 1),
        "statuses": dict(answers.statuses),
        "without_retry_after": answers.without_retry_after,
        "refused_ms": {
            name: round(1000 * refused[int(part * (len(refused) - 1))], 1)
            for name, part in (("p50", 0.5), ("p99", 0.99), ("most", 1.0))
            if refused
        },
        "growth_mb": max(growth.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--model", action="store_true", help="the demo model instead of a worker that sleeps")
    arguments = parser.parse_args()
    module, about = "tests.harness.ring.sleeping_worker", (MAX_TOKENS, CAPACITY)
    if arguments.model:
        module, about = "launch", (MODEL_MAX_TOKENS, 0.0)
    with launched(*SETTINGS, module=module) as launch:
        print(json.dumps(measure(launch, arguments.seconds, arguments.factor, *about), indent=1))


if __name__ == "__main__":
    main()
