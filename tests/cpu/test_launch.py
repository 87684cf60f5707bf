"""The launch as a user meets it: starts, fails clearly, stops at once, leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from tests.launched import Launched, is_alive, launched, leftovers, wait_until


def run_to_exit(*arguments: str, timeout_s: float = 30.0) -> tuple[int, str, float, Launched]:
    """(exit code, last line of its output, seconds, the launch) of a launch that ends by itself."""
    began = time.monotonic()
    launch = Launched(*arguments)
    code = launch.wait_exit(timeout_s)
    return code, launch.log().strip().splitlines()[-1], time.monotonic() - began, launch


def test_ctrl_c_when_idle_ends_everything_at_once() -> None:
    with launched() as launch:
        pids = launch.pids()
        assert len(pids) == 6
        began = time.monotonic()
        assert launch.stop() == 0
        assert time.monotonic() - began <= 1.5
        assert not [pid for pid in pids if is_alive(pid)]
        assert not leftovers(launch.run_dir)
        assert "Traceback" not in launch.log()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--model", "/nonexistent"], 72, "/nonexistent"),
        (["--page-size", "0"], 64, "page_size"),
        (["--no-such-flag"], 64, "--no-such-flag"),
        (["--tp-size", "2"], 64, "tp_size"),
        (["--context-length", "9999999"], 64, "context_length"),
        (["--schedule-policy", "no-such-policy"], 64, "no-such-policy"),
    ],
)
def test_a_launch_that_cannot_work_says_why_in_its_last_line(
    arguments: list[str], code: int, says: str
) -> None:
    got, last_line, seconds, launch = run_to_exit(*arguments)
    assert got == code, launch.log()
    assert says in last_line
    assert seconds <= 5.0 or code == 64
    assert not leftovers(launch.run_dir)
    launch.close()


def test_a_taken_port_is_known_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        got, last_line, seconds, launch = run_to_exit("--port", str(taken.getsockname()[1]))
    assert got == 69
    assert "port" in last_line
    assert seconds <= 2.0
    launch.close()


def test_a_run_directory_in_use_is_refused() -> None:
    with launched("--no-http") as first:
        second = Launched("--no-http", "--run-dir", str(first.run_dir))
        assert second.wait_exit(5.0) == 69
        assert first.process.poll() is None
        second.close()


@pytest.mark.parametrize("role", ["worker", "scheduler", "detokenizer", "tokenizer", "api"])
def test_the_death_of_any_child_ends_the_launch(role: str) -> None:
    with launched() as launch:
        pids = launch.pids()

        os.kill(launch.pid_of(role), signal.SIGKILL)
        assert launch.wait_exit(5.0) == 70
        last_line = launch.log().strip().splitlines()[-1]
        assert role in last_line
        assert not [pid for pid in pids if is_alive(pid)]
        assert not leftovers(launch.run_dir)


def test_children_end_with_a_killed_launcher_and_the_next_launch_cleans_up() -> None:
    with launched() as launch:
        pids = launch.pids()
        launch.process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), 1.0, "all children end")
        again = Launched("--no-http", "--run-dir", str(launch.run_dir))
        again.wait_ready()
        assert again.stop() == 0
        assert not leftovers(launch.run_dir)
        again.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 1.0, 2.0])
def test_a_signal_during_start_ends_it_cleanly(delay_s: float) -> None:
    launch = Launched()
    wait_until(
        lambda: launch.state() != {} or launch.process.poll() is not None, 10.0, "children are started"
    )
    time.sleep(delay_s)
    pids = launch.pids()
    began = time.monotonic()
    assert launch.stop() == 0, launch.log()
    assert time.monotonic() - began <= 2.0
    assert not [pid for pid in pids if is_alive(pid)]
    assert not leftovers(launch.run_dir)
    launch.close()
