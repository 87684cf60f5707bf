"""A launch that is sent mutated frames on every socket while it serves."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from carousel import Client, SamplingParams
from runtime.endpoints import Endpoints
from runtime.status_page import StatusPage
from tests.hostile_frames import hostile_frames
from tests.launched import Launched, launched, wait_until

NUM_FRAMES = 10_000
# One a second from each kind of counter, and the scheduler's own about its batches.
MAX_LOG_LINES = 60
SOCKETS = {
    "tokenizer_in": zmq.PUSH,
    "scheduler_in": zmq.PUSH,
    "detokenizer_in": zmq.PUSH,
    "client_out": zmq.DEALER,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def launch() -> Any:
    with launched("--no-http", "--cpu-threads", "1", "--max-running-requests", "16") as launch:
        yield launch


@contextmanager
def peer(run_dir: Path, name: str) -> Iterator[Any]:
    """A socket connected to `name`; everything sent on it has gone out with the block."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = context.socket(SOCKETS[name])
        address = getattr(Endpoints(run_dir), name)
        socket.connect(address() if callable(address) else address)
        yield socket
    finally:
        context.destroy(linger=5000)


def attack(run_dir: Path, name: str, epoch: int) -> None:
    union = "client_in" if name == "client_out" else name
    with peer(run_dir, name) as socket:
        for frames in hostile_frames(union, epoch, NUM_FRAMES, random.Random(1)):
            socket.send_multipart(frames)


def num_dropped(launch: Launched, name: str) -> int:
    """How many frames the owner of the socket says it has dropped; it says so with the next one only."""
    counts: list[int] = []

    def is_said() -> bool:
        with peer(launch.run_dir, name) as socket:
            socket.send(b"one more")
        counts.extend(map(int, re.findall(rf" {name}: dropped a frame \((\d+) so far\)", launch.log())))
        return max(counts, default=0) > 1

    wait_until(is_said, 10.0, "the count of dropped frames is logged")
    return max(counts)


@pytest.mark.parametrize("name", SOCKETS)
def test_mutated_frames_end_no_process_and_no_request(launch: Launched, name: str) -> None:
    num_lines = len(launch.log().splitlines())
    attacker = threading.Thread(target=attack, args=(launch.run_dir, name, launch.state()["epoch"]))
    answers: list[list[int]] = []
    with Client(launch.run_dir) as client:
        expected = client.generate("def f(", GREEDY, timeout=60).token_ids
        attacker.start()
        while attacker.is_alive() or not answers:
            answers += [each.token_ids for each in client.generate(["def f("] * 4, GREEDY, timeout=60)]
        attacker.join()
        answers.append(client.generate("def f(", GREEDY, timeout=60).token_ids)
    assert answers == [expected] * len(answers)
    assert num_dropped(launch, name) > NUM_FRAMES // 4
    assert launch.process.poll() is None
    assert len(launch.log().splitlines()) - num_lines < MAX_LOG_LINES
    assert "Traceback" not in launch.log()
    page = StatusPage(Endpoints(launch.run_dir).status_file)
    try:
        wait_until(lambda: page.read("detokenizer").num_running == 0, 5.0, "no sequence is left")
        wait_until(lambda: page.read("scheduler").num_running == 0, 5.0, "no row is left")
    finally:
        page.close()
