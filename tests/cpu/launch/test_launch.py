"""The launch as a user meets it: starts, fails clearly, stops at once, leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carousel import Client, RequestError, RingClosed, SamplingParams
from tests.harness.ring.launched import (
    ROOT,
    SLACK,
    START_S,
    Launched,
    is_alive,
    launched,
    leftovers,
    wait_until,
)

NOWHERE = str(ROOT / "tests/nowhere")
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)
SEVERAL = ("--tokenizer-workers=2", "--detokenizer-workers=2", "--api-workers=2")
# Of a launch whose model does not matter; its worker is there at once.
SLEEPING = "tests.harness.ring.sleeping_worker"
# Of a launch whose text does not matter either: (de)tokenizers start in a quarter of the time.
NO_TEXT = "--skip-tokenizer-init"


@pytest.fixture
def start() -> Iterator[Callable[..., Launched]]:
    """Starts launches that may end by themselves; whatever still runs is ended with the test."""
    launches: list[Launched] = []

    def start_one(*arguments: str, module: str = "launch", is_cold: bool = False) -> Launched:
        launches.append(Launched(*arguments, module=module, is_cold=is_cold))
        return launches[-1]

    yield start_one
    for launch in launches:
        launch.close()


def last_line(launch: Launched) -> str:
    return launch.log().strip().splitlines()[-1]


def test_ctrl_c_when_idle_ends_everything_at_once() -> None:
    with launched(is_cold=True) as launch:
        pids = launch.pids()
        assert len(pids) == 7
        # A terminal's Ctrl-C reaches one of them. Of several sessions, each would have its share of the
        # cores, whatever the priority of what runs in it.
        assert len({os.getpgid(pid) for pid in pids}) == 7
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}
        began = time.monotonic()
        assert launch.stop() == 0
        assert time.monotonic() - began <= 1.5 * SLACK
        assert not [pid for pid in pids if is_alive(pid)]
        assert not leftovers(launch.run_dir)
        assert "Traceback" not in launch.log()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--model", NOWHERE], 72, NOWHERE),
        (["--page-size", "0"], 64, "page_size"),
        (["--no-such-flag"], 64, "--no-such-flag"),
        (["--tp-size", "5"], 64, "tp_size: 5 ranks cannot share num_attention_heads"),
        (["--context-length", "9999999"], 64, "context_length"),
        (["--tokenizer", NOWHERE], 64, f"tokenizer: there is no directory {NOWHERE}"),
        (["--tokenizer", str(ROOT / "docs")], 72, str(ROOT / "docs")),
        (["--chat-template", str(ROOT / "tests/data/broken.jinja")], 64, "does not compile: line 2"),
        (["--tokenizer-workers", "0"], 64, "tokenizer_workers"),
        (["--zmq-bind", "tcp://0.0.0.0:5000"], 64, "--curve-dir"),
        (["--zmq-bind", "tcp://127.0.0.1:5000", "--curve-dir", NOWHERE], 64, "server.key_secret"),
    ],
)
def test_settings_that_cannot_work_are_known_before_anything_is_started(
    start: Callable[..., Launched], arguments: list[str], code: int, says: str
) -> None:
    launch = start(*arguments)
    assert launch.wait_exit(5.0) == code, launch.log()
    assert says in last_line(launch)
    assert not leftovers(launch.run_dir)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--schedule-policy", "no_such_module:Policy"], 64, "no_such_module"),
        (["--tokenizer", "{folder}"], 72, "The tokenizer in {folder} cannot be read"),
        (
            ["--tokenizer", "{folder}", "--detokenizer-workers", "3"],
            72,
            "The tokenizer in {folder} cannot be read",
        ),
    ],
)
def test_a_launch_that_cannot_work_says_why_in_its_last_line(
    start: Callable[..., Launched], arguments: list[str], code: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [], "model": {}}')
    launch = start(*(each.format(folder=tmp_path) for each in arguments), module=SLEEPING)
    assert launch.wait_exit(30.0) == code, launch.log()
    assert says.format(folder=tmp_path) in last_line(launch)
    assert not leftovers(launch.run_dir)


def test_a_taken_port_is_known_before_anything_is_loaded(start: Callable[..., Launched]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launch = start("--port", str(taken.getsockname()[1]))
        assert launch.wait_exit(2.0) == 69
    assert "port" in last_line(launch)


def test_a_run_directory_in_use_is_refused(start: Callable[..., Launched]) -> None:
    first = start("--no-http", NO_TEXT, module=SLEEPING).wait_ready()
    second = start("--no-http", "--run-dir", str(first.run_dir))
    assert second.wait_exit(5.0) == 69
    assert "run_dir" in last_line(second)
    assert first.process.poll() is None


@pytest.mark.parametrize(
    ("role", "index"),
    [("worker", 0), ("scheduler", 0), ("detokenizer", 1), ("tokenizer", 1), ("api", 1)],
)
def test_the_death_of_any_process_ends_the_launch_and_every_call(role: str, index: int) -> None:
    """Without restarts. Who it was is said last; no call hangs and nothing is left."""
    settings = ("--restart=never", *SEVERAL)
    prompts: list[str] | list[list[int]] = [f"def f{number}(" for number in range(3)]
    ring = launched(*settings)
    if role != "worker":
        ring, prompts = launched(*settings, NO_TEXT, module=SLEEPING), [[5, 6, number] for number in range(3)]
    with ring as launch, Client(launch.run_dir) as client:
        pids = launch.pids()
        streams = [client.stream(prompt, ENDLESS, timeout=60) for prompt in prompts]
        next(streams[0])
        os.kill(launch.pid_of(role, index), signal.SIGKILL)
        for stream in streams:
            # The scheduler outlives the worker for as long as it takes to fail what the worker held.
            with pytest.raises((RingClosed, RequestError)) as caught:
                list(stream)
            if isinstance(caught.value, RequestError):
                assert caught.value.status == 503
        assert launch.wait_exit(5.0) == 70
        assert (f"{role}:{index}" if index else role) in last_line(launch)
        assert not [pid for pid in pids if is_alive(pid)]
        assert not leftovers(launch.run_dir)


def test_a_killed_launcher_leaves_nothing_and_its_port_and_directory_can_be_had_at_once(
    start: Callable[..., Launched],
) -> None:
    launch = start().wait_ready()
    state = launch.state()
    pids = [*launch.pids(), state["guardian_pid"]]
    launch.process.kill()
    same = ("--port", str(state["port"]), "--run-dir", str(launch.run_dir))
    # A fork would want the port before the guardian has ended who had it; a user's start imports first.
    again = start(*same, NO_TEXT, module=SLEEPING, is_cold=True)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 1.0, "all processes end")
    again.wait_ready()
    assert again.state()["port"] == state["port"]
    assert again.stop() == 0
    assert not leftovers(launch.run_dir)


def test_a_launch_whose_guardian_was_killed_cleans_up_itself(start: Callable[..., Launched]) -> None:
    launch = start("--no-http", NO_TEXT, module=SLEEPING).wait_ready()
    os.kill(launch.state()["guardian_pid"], signal.SIGKILL)
    assert launch.stop() == 0
    assert not leftovers(launch.run_dir)


def test_a_directory_that_a_killed_launch_and_its_guardian_left_is_cleared_by_the_next(
    start: Callable[..., Launched],
) -> None:
    launch = start("--api-workers=2", module=SLEEPING).wait_ready()
    os.kill(launch.state()["guardian_pid"], signal.SIGKILL)
    launch.process.kill()
    launch.process.wait()
    assert {"state.json", "grammar_in", "http_spans1", "api_orders1"} <= set(os.listdir(launch.run_dir))
    again = start("--no-http", "--run-dir", str(launch.run_dir), NO_TEXT, module=SLEEPING).wait_ready()
    assert again.stop() == 0
    assert not leftovers(launch.run_dir)


@pytest.mark.parametrize("delay_s", [0.0, pytest.param(0.3, marks=pytest.mark.full), 1.0])
def test_a_signal_during_start_ends_it_cleanly(start: Callable[..., Launched], delay_s: float) -> None:
    launch = start(is_cold=delay_s > 0)  # later: while it imports
    wait_until(
        lambda: launch.state() != {} or launch.process.poll() is not None, 10.0, "children are started"
    )
    time.sleep(delay_s)
    pids = launch.pids()
    began = time.monotonic()
    assert launch.stop() == 0, launch.log()
    assert time.monotonic() - began <= 2.0 * SLACK
    assert not [pid for pid in pids if is_alive(pid)]
    assert not leftovers(launch.run_dir)


def test_a_child_that_ends_by_itself_without_an_error_is_a_fault_too() -> None:
    with launched("--no-http", "--restart=never", NO_TEXT, module=SLEEPING) as launch:
        os.kill(launch.pid_of("tokenizer"), signal.SIGTERM)
        assert launch.wait_exit(5.0) == 70
        assert "tokenizer: the process exited with code 0" in last_line(launch)


def test_children_end_at_once_with_a_launcher_that_is_killed_while_they_start(
    start: Callable[..., Launched],
) -> None:
    launch = start(is_cold=True)
    wait_until(lambda: launch.state() != {}, 10.0, "children are started")
    pids = launch.pids()
    assert len(pids) == 7
    launch.process.kill()
    launch.process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 0.5, "all children end")
    wait_until(lambda: not leftovers(launch.run_dir), 5.0, "the directory is removed")


def test_a_launch_whose_directory_is_deleted_serves_on_and_stops_cleanly() -> None:
    with launched("--no-http", NO_TEXT, module=SLEEPING) as launch, Client(launch.run_dir) as client:
        pids = launch.pids()
        client.generate([5], SHORT, timeout=60)  # so that its sockets are connected
        shutil.rmtree(launch.run_dir)
        assert len(client.generate([5], SHORT, timeout=60).token_ids) == 4
        assert launch.stop() == 0
        assert "Traceback" not in launch.log()
        assert not [pid for pid in pids if is_alive(pid)]


@pytest.fixture
def start_with_stderr(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Starts a launch in `tmp_path`/run whose standard error is the given descriptor; returns it ready."""
    processes: list[subprocess.Popen[bytes]] = []

    def start_one(stderr: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", SLEEPING, "--no-http", "--restart=never", "--decode-log-interval=1"]
        process = subprocess.Popen(
            [*command, NO_TEXT, "--run-dir", str(tmp_path / "run")], stdout=stderr, stderr=stderr, cwd=ROOT
        )
        processes.append(process)
        page = tmp_path / "run" / "state.json"

        def is_ready() -> bool:
            return page.exists() and json.loads(page.read_bytes())["state"] == "ready"

        wait_until(is_ready, START_S, "the launch gets ready")
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.wait()


def test_a_log_that_nobody_reads_holds_up_nothing(
    tmp_path: Path, start_with_stderr: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    reader, writer = os.pipe()
    try:
        size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writer, bytes(size))  # so full that no line finds room
        launch = start_with_stderr(writer)
        with Client(tmp_path / "run") as client:
            assert len(client.generate([5], SHORT, timeout=60).token_ids) == 4
        launch.send_signal(signal.SIGINT)
        assert launch.wait(2.0 * SLACK) == 0
    finally:
        os.close(reader)
        os.close(writer)


def test_a_log_whose_reader_is_gone_changes_no_exit_code(
    tmp_path: Path, start_with_stderr: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    launch = start_with_stderr(writer)
    os.close(writer)
    with Client(tmp_path / "run") as client:
        assert len(client.generate([5], SHORT, timeout=60).token_ids) == 4
    state = json.loads((tmp_path / "run" / "state.json").read_bytes())
    os.kill(next(child["pid"] for child in state["children"] if child["role"] == "tokenizer"), signal.SIGKILL)
    assert launch.wait(5.0 * SLACK) == 70
    assert not leftovers(tmp_path / "run")
