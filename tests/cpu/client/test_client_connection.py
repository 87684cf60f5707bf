"""The connection behind a client: handshake, pings, bad frames; nothing hangs when the ring goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from carousel import (
    Client,
    Overloaded,
    ProtocolMismatch,
    ResultStream,
    RingClosed,
    SamplingParams,
)
from carousel.client.connection import connection as connection_module
from carousel.client.connection.handover import MAX_BYTES
from carousel.client.connection.lane import DRAIN_BYTES, Lane
from carousel.client.core import ring_state
from carousel.client.core.request.submission import Submission
from runtime.ring.keys import CLIENT, make_keys
from runtime.wire.format import PROTOCOL_VERSION
from runtime.wire.handle import client_of, sequence_key
from runtime.wire.messages import Hello, OutputBatch, SequenceOutput
from runtime.wire.status_page import ProcessStatus
from tests.harness.ring.fake_ring import (
    CLIENT_ID,
    EPOCH,
    WAIT_S,
    FakeRing,
    TcpDoor,
    fake_ring,
    foreign_header,
    say_nothing,
    spell,
)
from tests.harness.ring.launched import SLACK, wait_until

Place: TypeAlias = dict[str, Any]


@pytest.fixture(autouse=True)
def _short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_state, "TICK_S", 0.01)


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[FakeRing]:
    with fake_ring(tmp_path, spell("abc")) as ring:
        yield ring


@pytest.fixture
def client(ring: FakeRing) -> Iterator[Client]:
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        yield client


def test_a_bad_frame_ends_nothing(client: Client, ring: FakeRing) -> None:
    client.server_info()
    for frame in (b"", b"junk", b"\xff" * 64):
        ring.send_frame(frame)
    assert client.generate("x").text == "abc"


def test_output_of_an_unknown_sequence_is_ignored(client: Client, ring: FakeRing) -> None:
    client.server_info()
    ring.send_message(OutputBatch((SequenceOutput(b"\0" * 16, "ghost"),)))
    assert client.generate("x").text == "abc"


def test_another_build_is_named_with_both_versions(tmp_path: Path) -> None:
    with fake_ring(tmp_path) as ring:
        ring.foreign_header = foreign_header()
        other, own = PROTOCOL_VERSION + 8, PROTOCOL_VERSION
        with pytest.raises(ProtocolMismatch, match=rf"version {other}.*version {own}"):
            Client(tmp_path, connect_timeout=WAIT_S)


def test_a_server_that_does_not_answer_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    with fake_ring(tmp_path) as ring:
        ring.shakes_hands = False
        with pytest.raises(RingClosed, match=r"not answered within 0.05 s"):
            Client(tmp_path, connect_timeout=0.05)


def test_a_greeting_that_dies_with_its_detokenizer_is_said_again(tmp_path: Path) -> None:
    clients: list[Client] = []
    with fake_ring(tmp_path, spell("abc")) as ring:
        ring.shakes_hands = False
        opening = threading.Thread(target=lambda: clients.append(Client(tmp_path, connect_timeout=WAIT_S)))
        opening.start()
        ring.wait_for(lambda: ring.hellos)
        ring.shakes_hands = True
        opening.join()
        with clients[0] as client:
            assert client.generate("x").text == "abc"


def test_a_detokenizer_that_is_replaced_while_its_client_connects_costs_nothing(tmp_path: Path) -> None:
    clients: list[Client] = []
    with fake_ring(tmp_path, spell("abc")) as ring:
        ring.lets_in.clear()
        opening = threading.Thread(target=lambda: clients.append(Client(tmp_path, connect_timeout=WAIT_S)))
        opening.start()
        wait_until(lambda: bool(ring.hellos), WAIT_S, "the greeting has come")
        ring.status.write("detokenizer", ProcessStatus(EPOCH + 1, os.getpid(), "ready", time.monotonic_ns()))
        ring.lets_in.set()
        opening.join()
        with clients[0] as client:
            ring.wait_for(lambda: any(hello.client == CLIENT_ID for hello in ring.hellos))
            assert client.generate("x").text == "abc"


def test_of_a_connection_that_is_replaced_only_so_much_is_still_read(
    client: Client, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detokenizer that is still there may go on to send. Before, it was read for as long as it did."""
    first, num_read = client._session.connection._lanes[0], 0  # type: ignore[attr-defined]
    receive = Lane.receive

    def never_end(lane: Lane) -> tuple[list[Any], int]:
        nonlocal num_read
        if lane is not first:
            return receive(lane)
        num_read += 1
        return [OutputBatch((SequenceOutput(b"\0" * 16, "ghost"),))], DRAIN_BYTES

    monkeypatch.setattr(Lane, "receive", never_end)
    ring.status.write("detokenizer", ProcessStatus(EPOCH + 1, os.getpid(), "ready", time.monotonic_ns()))
    ring.wait_for(lambda: any(hello.client == CLIENT_ID for hello in ring.hellos))
    assert num_read == MAX_BYTES // DRAIN_BYTES
    assert client.generate("x", timeout=WAIT_S).text == "abc"


def test_no_runtime_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(RingClosed, match="there is no runtime of this version"):
        Client(tmp_path)


@pytest.mark.parametrize(("state", "says"), [("failed", "has failed"), ("absent", "has been stopped")])
def test_every_pending_sequence_ends_when_the_ring_is_gone(tmp_path: Path, state: str, says: str) -> None:
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        streams = [client.stream("x", timeout=WAIT_S) for _ in range(3)]
        ring.set_state("launcher", state)
        for stream in streams:
            with pytest.raises(RingClosed, match=says):
                next(stream)
        with pytest.raises(RingClosed, match=says):
            client.generate("x")


def test_a_call_after_the_end_keeps_no_frames_of_the_calls_before_it(tmp_path: Path) -> None:
    with fake_ring(tmp_path) as ring, Client(tmp_path) as client:
        ring.set_state("launcher", "failed")
        depths = []
        for _ in range(4):
            with pytest.raises(RingClosed) as raised:
                client.generate("x", timeout=WAIT_S)
            depths.append(len(raised.traceback))
        assert depths[1] == depths[2] == depths[3]


def test_a_dead_launcher_is_noticed_though_its_page_still_says_ready(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with fake_ring(tmp_path) as ring:
        ring.set_state("launcher", "ready", pid=launcher.pid)
        with Client(tmp_path) as client:
            stream = client.stream("x", timeout=WAIT_S)
            launcher.kill()
            began = time.monotonic()
            with pytest.raises(RingClosed, match="launcher is dead"):
                next(stream)
            assert time.monotonic() - began < SLACK
    # Only now is the zombie reaped: it must count as dead before that.
    launcher.communicate()


@pytest.fixture(params=["in a run directory", "over TCP"])
def reached(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[FakeRing, Place]]:
    """A ring that answers no request, and where it is reached, as arguments of Client."""
    if request.param == "in a run directory":
        with fake_ring(tmp_path) as ring:
            yield ring, {"run_dir": tmp_path}
        return
    make_keys(tmp_path / "keys")
    door = TcpDoor(2, tmp_path / "keys")
    with fake_ring(tmp_path, door=door) as ring:
        yield ring, {"run_dir": f"tcp://127.0.0.1:{door.port}", "curve_dir": tmp_path / "keys" / CLIENT}


def test_a_ring_that_stays_silent_is_gone(
    reached: tuple[FakeRing, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, place = reached
    with Client(**place, connect_timeout=WAIT_S, ring_timeout=0.1) as client:
        ring.shakes_hands = False
        monkeypatch.setattr(ring_state, "SILENCE_S", 0.05)
        with pytest.raises(RingClosed, match=r"one that answers, for 0.1 s"):
            client.generate("x", timeout=WAIT_S)


def test_a_request_outlives_a_detokenizer_that_hangs_for_longer_than_silence(
    reached: tuple[FakeRing, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher replaces it after `--stall-timeout`, which is longer."""
    ring, place = reached

    def claimed() -> list[Hello]:
        """Greetings that claim an id. Those before, for a new id, are repeated until there is an answer."""
        return [hello for hello in ring.hellos if hello.client]

    monkeypatch.setattr(ring_state, "PING_S", 0.05)
    with Client(**place, connect_timeout=WAIT_S) as client:
        stream = client.stream("x", timeout=WAIT_S)
        first = ring.wait_request()
        ring.shakes_hands = False
        monkeypatch.setattr(ring_state, "SILENCE_S", 0.05)
        ring.wait_for(claimed)
        monkeypatch.setattr(ring_state, "SILENCE_S", WAIT_S)
        ring.answer = spell("abc")
        ring.shakes_hands = True
        assert "".join(delta.text for delta in stream) == "abc"
        again = ring.wait_request(1)
        assert sequence_key(again.handle) == sequence_key(first.handle)
        assert {hello.client for hello in claimed()} == {client_of(first.handle)}


def test_a_client_that_was_stopped_for_longer_than_anybody_waits_goes_on(
    reached: tuple[FakeRing, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal, or with the machine. The detokenizer has forgotten it: what it had asked for is gone."""
    ring, place = reached
    stopped_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s[0])
    monkeypatch.setattr("carousel.client.connection.connection.time", clock)
    with Client(**place, connect_timeout=WAIT_S) as client:
        stream = client.stream("x", timeout=WAIT_S)
        ring.wait_request()
        ring.answer = spell("abc")
        stopped_s[0] = 10 * ring_state.RING_TIMEOUT_S
        assert "".join(delta.text for delta in stream) == "abc"


@contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def test_a_stopped_launcher_ends_nothing_until_it_dies(tmp_path: Path) -> None:
    """However long ago its last heartbeat is: whoever serves needs it only when another process dies."""
    launcher = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    launcher.send_signal(signal.SIGSTOP)
    with killed_at_the_end(launcher), fake_ring(tmp_path) as ring:
        since_boot = 1
        ring.status.write("launcher", ProcessStatus(EPOCH, launcher.pid, "ready", since_boot))
        with Client(tmp_path, connect_timeout=WAIT_S) as client:
            ring.answer = spell("abc")
            assert client.generate("x", timeout=WAIT_S).text == "abc"
            ring.answer = say_nothing
            stream = client.stream("x", timeout=WAIT_S)
            launcher.kill()
            with pytest.raises(RingClosed, match="launcher is dead"):
                next(stream)


@pytest.mark.parametrize("has_beaten", [True, False])
def test_a_process_that_holds_no_lock_is_not_the_launcher(tmp_path: Path, has_beaten: bool) -> None:
    """The number of a dead launcher may belong to another process by now."""
    with fake_ring(tmp_path) as ring:
        if not has_beaten:
            ring.set_state("launcher", "absent", pid=0)
        ring.release_lock()
        with pytest.raises(RingClosed, match="launcher is dead"), Client(tmp_path) as client:
            client.generate("x", timeout=WAIT_S)


def test_closing_ends_the_waiters_of_other_threads_and_aborts_on_the_server(tmp_path: Path) -> None:
    with fake_ring(tmp_path) as ring:
        client = Client(tmp_path)
        caught: list[BaseException] = []

        def call() -> None:
            try:
                client.generate("x")
            except RingClosed as error:
                caught.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        ring.wait_request()
        client.close()
        client.close()
        caller.join(WAIT_S)
        assert len(caught) == 1
        assert ring.wait_abort().client == CLIENT_ID
        with pytest.raises(RingClosed, match="closed"):
            client.generate("y")


def test_a_client_may_be_closed_by_its_own_thread(tmp_path: Path) -> None:
    """The garbage collector may run a destructor there that closes it. A thread cannot wait for itself."""
    errors: list[BaseException] = []

    with fake_ring(tmp_path, spell("a")):
        client = Client(tmp_path)
        thread = client._session.connection._thread  # type: ignore[attr-defined]

        def close(_: object) -> None:
            assert threading.current_thread() is thread
            try:
                client.close()
            except BaseException as error:
                errors.append(error)

        client._session.submit(Submission("x", SamplingParams()), close)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert errors == []


def test_a_call_made_while_the_client_closes_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_ring(tmp_path):
        client = Client(tmp_path)
        streams: list[ResultStream] = []
        close = client._session.connection.close

        def call_and_close() -> None:
            streams.append(client.stream("late"))
            close()

        monkeypatch.setattr(client._session.connection, "close", call_and_close)
        client.close()
        with pytest.raises(RingClosed):
            next(streams[0])


def test_a_forked_copy_of_a_client_is_refused_and_not_left_waiting(client: Client, ring: FakeRing) -> None:
    client._session.connection._pid = 0  # type: ignore[attr-defined]
    with pytest.raises(RingClosed, match="forked"):
        client.generate("x")


def test_a_forked_copy_waits_for_no_lock_of_a_thread_that_it_has_not(client: Client, ring: FakeRing) -> None:
    """Another thread was in the middle of a call at the moment of the fork."""
    session: Any = client._session
    ring.answer = say_nothing
    stream = client.stream("x", timeout=WAIT_S)
    ring.wait_request()
    ended = threading.Event()

    def use_and_leave() -> None:
        with pytest.raises(RingClosed, match="forked"):
            client.generate("x")
        stream.close()
        client.close()
        ended.set()

    pid = session.connection._pid
    with session._sending, session.connection._wake_lock:
        session.connection._pid = 0
        copy = threading.Thread(target=use_and_leave)
        copy.start()
        assert ended.wait(WAIT_S)
    copy.join()
    session.connection._pid = pid


def test_a_client_pings_from_its_own_thread(client: Client, ring: FakeRing) -> None:
    ring.wait_for(lambda: ring.pings)
    assert ring.pings[0].client == CLIENT_ID


def test_a_server_that_takes_nothing_makes_callers_overloaded_and_not_blocked(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNSENT", 0)
    with pytest.raises(Overloaded):
        client.generate("x", timeout=WAIT_S)


def test_a_client_that_nobody_refers_to_ends_once_its_streams_have(
    ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, its thread went on for as long as the process."""
    num_ticks, tick = 0, ring_state.RingState.tick

    def counted(*arguments: Any) -> Any:
        nonlocal num_ticks
        num_ticks += 1
        return tick(*arguments)

    monkeypatch.setattr(ring_state.RingState, "tick", counted)
    ring.answer = say_nothing
    client = Client(ring.run_dir, connect_timeout=WAIT_S)
    thread = client._session.connection._thread  # type: ignore[attr-defined]
    stream = client.stream("x", timeout=WAIT_S)
    del client
    asked = ring.wait_request()
    later = num_ticks + 3
    wait_until(lambda: num_ticks > later, WAIT_S, "it goes on for its stream")
    for each in spell("abc")(asked):
        ring.send(each)
    assert stream.completion().text == "abc"
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_closing_leaves_no_thread_and_no_file_descriptor(tmp_path: Path) -> None:
    with fake_ring(tmp_path, spell("a")):
        Client(tmp_path).close()
        threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with Client(tmp_path) as client:
                client.generate("x")
        assert threading.active_count() == threads
        # The fake ring's end of a connection closes a moment after ours.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds, WAIT_S, "all is closed")
