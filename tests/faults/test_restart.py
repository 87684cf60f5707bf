"""A process that is killed, stopped or ends by itself is replaced, and the launch serves on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from carousel import Client, SamplingParams
from runtime.launcher.watchdog import STOPPED_S
from runtime.ring.endpoints import Endpoints
from runtime.ring.liveness import is_stopped
from runtime.wire.status_page import StatusPage
from tests.faults.launch import ENGINE, ROLES, SETTLE_S, FaultyLaunch, faulty_launch, still_same
from tests.faults.load import Load, body
from tests.harness.ring.launched import Launched, is_alive, launched, leftovers, wait_until


@pytest.fixture(scope="module")
def faulty() -> Iterator[FaultyLaunch]:
    with faulty_launch() as faulty:
        yield faulty


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_is_replaced_and_its_unit_alone(faulty: FaultyLaunch, role: str) -> None:
    faulty.wait_ready()
    launch = faulty.launch
    before = {each: launch.pid_of(each) for each in ROLES}
    epoch = launch.state()["epoch"]
    pid = faulty.kill(role)
    unit = ENGINE if role in ENGINE else (role,)
    for each in unit:
        faulty.wait_replaced(each, before[each])
    faulty.wait_ready()
    state = launch.state()
    assert state["state"] == "ready"
    epochs = {child["role"]: child["epoch"] for child in state["children"]}
    assert state["epoch"] == epoch + 1
    for each in ROLES:
        assert (launch.pid_of(each) == before[each]) == (each not in unit), each
        assert (epochs[each] == epoch + 1) == (each in unit), each
    assert not is_alive(pid)
    assert faulty.events("exit")[-len(unit)]["signal"] == "SIGKILL"
    assert faulty.events("restart")[-1]["unit"] == ("engine" if role in ENGINE else role)
    assert faulty.serves()
    faulty.check_accounts()


@pytest.mark.parametrize("role", ["scheduler", pytest.param("tokenizer", marks=pytest.mark.full)])
def test_a_process_that_ends_by_itself_is_replaced_too(faulty: FaultyLaunch, role: str) -> None:
    faulty.wait_ready()
    pid = faulty.kill(role, signal.SIGTERM)
    faulty.wait_replaced(role, pid)
    faulty.wait_ready()
    exits = [event for event in faulty.events("exit") if event["pid"] == pid]
    # Its worker ends with it: where that is seen first the launcher kills what is left of the engine.
    assert [event.get("code", event.get("signal")) for event in exits] in ([0], ["SIGKILL"])
    assert faulty.serves()


def test_an_engine_that_takes_the_place_of_a_paused_one_is_paused(faulty: FaultyLaunch) -> None:
    faulty.wait_ready()
    with Client(faulty.launch.run_dir) as client:
        client.pause_generation(timeout=SETTLE_S)
        stream = client.stream("x", SamplingParams(max_tokens=4, ignore_eos=True), timeout=SETTLE_S)
        pid = faulty.kill("scheduler")
        faulty.wait_replaced("scheduler", pid)
        assert client.server_info(timeout=SETTLE_S)["is_paused"] is True
        wait_until(lambda: faulty.ready() == (503, "scheduler"), 5.0, "/ready says so")
        client.continue_generation(timeout=SETTLE_S)
        assert sum(len(delta.token_ids) for delta in stream) == 4
    faulty.wait_ready()


@pytest.mark.parametrize(
    "role",
    ["scheduler", *(pytest.param(role, marks=pytest.mark.full) for role in ROLES if role != "scheduler")],
)
def test_a_stopped_process_is_named_and_replaced(faulty: FaultyLaunch, role: str) -> None:
    """A rank that is stopped: also tests/cpu/parallel/test_node_deaths.py."""
    faulty.wait_ready()
    pid = faulty.kill(role, signal.SIGSTOP)
    if role != "api":  # it is the one that would say so
        wait_until(lambda: faulty.ready() == (503, role), 15.0, "/ready names it")
    faulty.wait_replaced(role, pid)
    faulty.wait_ready()
    assert "stopped" in faulty.events("hang")[-1]["reason"]
    assert faulty.events("hang")[-1]["process"] == role
    assert faulty.serves()


def test_a_process_that_is_stopped_for_a_moment_goes_on(faulty: FaultyLaunch) -> None:
    faulty.wait_ready()
    pids = faulty.launch.pids()
    stopped = [faulty.launch.pid_of(role) for role in ROLES]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert still_same(faulty, pids, 0.5)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert still_same(faulty, pids, STOPPED_S + 0.5)
    faulty.wait_ready()
    assert faulty.launch.pids() == pids
    assert faulty.serves()


def test_a_launcher_that_is_stopped_ends_nothing(faulty: FaultyLaunch) -> None:
    """However long: the page is made to say that its last heartbeat was when the machine started."""
    faulty.wait_ready()
    launcher = faulty.launch.process
    with Client(faulty.launch.run_dir) as client:
        stream = client.stream("x", SamplingParams(max_tokens=64, ignore_eos=True), timeout=SETTLE_S)
        next(stream)
        launcher.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(launcher.pid), 10.0, "it is stopped")
            said = faulty.page.read("launcher")
            faulty.page.write("launcher", said._replace(heartbeat_ns=1))
            assert faulty.ready() == (503, "launcher")
            for _ in stream:
                pass
            assert stream.state.completion().usage.completion_tokens == 64
            for _ in range(3):  # more than one look of each client at its ring
                time.sleep(0.2)
                assert faulty.http.post("/v1/completions", json=body("x", 4, stream=False)).is_success
                assert faulty.serves()
        finally:
            launcher.send_signal(signal.SIGCONT)
    faulty.wait_ready()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", ["launch", "tests.harness.ring.sleeping_worker"])
def test_no_stream_fails_while_the_launcher_is_stopped_for_a_minute(module: str) -> None:
    with launched("--restart=auto", "--dtype=float32", module=module) as launch:
        with Load(launch.run_dir, launch.url, num_streams=48, num_http=16, num_plain=4) as load:
            pids = launch.pids()
            launch.process.send_signal(signal.SIGSTOP)
            num_before = load.account.num_done
            time.sleep(60.0)
            launch.process.send_signal(signal.SIGCONT)
            num_done = load.account.num_done - num_before
        assert load.account.failed == []
        assert load.account.wrong == []
        assert num_done > 64
        assert launch.pids() == pids


def test_a_disk_that_hangs_holds_up_neither_a_restart_nor_the_end() -> None:
    """Nobody reads from the pipe, so the thread that opens it to write the state waits for ever."""
    with launched("--no-http", module="tests.harness.ring.sleeping_worker") as launch:
        endpoints = Endpoints(launch.run_dir)
        os.mkfifo(endpoints.state_file.with_suffix(".new"))
        first, page = launch.pid_of("tokenizer"), StatusPage(endpoints.status_file)
        os.kill(first, signal.SIGKILL)

        def is_replaced() -> bool:
            tokenizer = page.read("tokenizer")
            return tokenizer.pid != first and tokenizer.state == "ready"

        wait_until(is_replaced, 30.0, "the tokenizer is replaced")
        assert launch.pid_of("tokenizer") == first, "the disk does not hang"
        page.close()
        launch.process.terminate()
        assert launch.wait_exit(10.0) == 0
        assert "does not answer" in launch.log()
        wait_until(lambda: not leftovers(launch.run_dir), 10.0, "the guardian removes the directory")


def test_a_process_that_dies_too_often_ends_the_launch() -> None:
    arguments = ("--no-http", "--restart=auto", "--max-restarts=1")
    with launched(*arguments, module="tests.harness.ring.sleeping_worker") as launch:
        first = launch.pid_of("tokenizer")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: _is_replaced(launch, first), 60.0, "the first death is mended")
        os.kill(launch.pid_of("tokenizer"), signal.SIGKILL)
        assert launch.wait_exit(10.0) == 70
        last_line = launch.log().strip().splitlines()[-1]
        assert "tokenizer: the process was killed by SIGKILL; restarted 1 times in 60 s before" in last_line
        assert not leftovers(launch.run_dir)


def _is_replaced(launch: Launched, pid: int) -> bool:
    children = launch.state()["children"]
    return any(child["role"] == "tokenizer" and child["pid"] != pid and child["ready"] for child in children)
