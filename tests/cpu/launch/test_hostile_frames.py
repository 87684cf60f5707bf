"""A launch that is sent mutated frames on every socket of the ring while it serves."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

from carousel import Client, SamplingParams
from runtime.ring.endpoints import Endpoints
from runtime.wire.status_page import StatusPage
from tests.harness.ring.hostile_frames import hostile_frames
from tests.harness.ring.launched import Launched, launched, wait_until
from tests.harness.ring.resources import memory_mb

# The first so many may enlarge what is reused.
WARM_UP = 1000
MAX_GROWTH_MB = 16
# Each counter of a process says one line a second.
MAX_LOG_LINES_PER_S = 3


class Door(NamedTuple):
    address: Callable[[Endpoints], str]
    kind: int = zmq.PUSH
    union: str = ""


DOORS = {
    "tokenizer_in": Door(Endpoints.tokenizer_in),
    "scheduler_in": Door(lambda endpoints: endpoints.scheduler_in),
    "grammar_in": Door(lambda endpoints: endpoints.grammar_in),
    "detokenizer_in": Door(Endpoints.detokenizer_in),
    "client_out": Door(Endpoints.client_out, zmq.DEALER, "client_in"),
    "rank_in": Door(lambda endpoints: endpoints.rank_in(0)),
    "step_results": Door(lambda endpoints: endpoints.step_results),
    "launcher_in": Door(lambda endpoints: endpoints.launcher_in),
}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def launch() -> Any:
    arguments = ("--cpu-threads", "1", "--max-running-requests", "16", "--log-level", "warning")
    with launched("--no-http", *arguments) as launch:
        yield launch


@contextmanager
def peer(run_dir: Path, name: str) -> Iterator[Any]:
    """A socket connected to `name`; everything sent on it has gone out with the block."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = context.socket(DOORS[name].kind)
        socket.connect(DOORS[name].address(Endpoints(run_dir)))
        yield socket
    finally:
        context.destroy(linger=5000)


class Attack(threading.Thread):
    def __init__(self, launch: Launched, name: str, count: int) -> None:
        super().__init__(daemon=True)
        self._launch, self._name, self._count = launch, name, count
        self.memory_mb: dict[int, int] = {}
        """Memory of each process, after the first frames."""

    def run(self) -> None:
        union = DOORS[self._name].union or self._name
        epoch = self._launch.state()["epoch"]
        with peer(self._launch.run_dir, self._name) as socket:
            for number, frames in enumerate(hostile_frames(union, epoch, self._count, random.Random(1))):
                if number == WARM_UP:
                    self.memory_mb = memory_mb(self._launch.pids())
                socket.send_multipart(frames)


def num_dropped(launch: Launched, name: str, client: Client) -> int:
    """How many frames the owner of the socket says it has dropped; it says so with the next one only."""
    counts: list[int] = []

    def is_said() -> bool:
        with peer(launch.run_dir, name) as socket:
            socket.send(b"one more")
        client.generate("def f(", GREEDY, timeout=60)  # some sockets are read in the course of a step only
        counts.extend(map(int, re.findall(rf" {name}: dropped a frame \((\d+) so far\)", launch.log())))
        return max(counts, default=0) > 1

    wait_until(is_said, 30.0, "the count of dropped frames is logged")
    return max(counts)


@pytest.mark.parametrize(
    "count",
    [4_000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
    ids=["short", "long"],
)
@pytest.mark.parametrize("name", DOORS)
def test_mutated_frames_end_no_process_and_no_request(launch: Launched, name: str, count: int) -> None:
    num_lines, pids = len(launch.log().splitlines()), launch.pids()
    began = time.monotonic()
    attack = Attack(launch, name, count)
    answers: list[list[int]] = []
    with Client(launch.run_dir) as client:
        expected = client.generate("def f(", GREEDY, timeout=60).token_ids
        attack.start()
        while attack.is_alive() or not answers:
            answers += [each.token_ids for each in client.generate(["def f("] * 4, GREEDY, timeout=60)]
        attack.join()
        answers.append(client.generate("def f(", GREEDY, timeout=60).token_ids)
        dropped = num_dropped(launch, name, client)
    assert answers == [expected] * len(answers)
    assert dropped > count // 5
    assert launch.process.poll() is None
    assert launch.pids() == pids, "a process was replaced"
    max_lines = 60 + MAX_LOG_LINES_PER_S * (time.monotonic() - began)
    assert len(launch.log().splitlines()) - num_lines < max_lines
    assert "Traceback" not in launch.log()
    after = memory_mb(pids)
    growth = {pid: after[pid] - before for pid, before in attack.memory_mb.items()}
    assert max(growth.values()) < MAX_GROWTH_MB, growth
    print(
        f"{name}: {count} frames in {time.monotonic() - began:.0f} s, {dropped} dropped, "
        f"{len(answers)} good answers, growth {max(growth.values())} MB"
    )
    page = StatusPage(Endpoints(launch.run_dir).status_file)
    try:
        wait_until(lambda: page.read("detokenizer").num_running == 0, 5.0, "no sequence is left")
        wait_until(lambda: page.read("scheduler").num_running == 0, 5.0, "no row is left")
    finally:
        page.close()
