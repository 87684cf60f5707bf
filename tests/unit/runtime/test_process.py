"""Last words of a process that fails, and the end of its wait."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import zmq

from runtime.base.wake import Wake
from runtime.ring.endpoints import Endpoints
from runtime.ring.process import LaunchFile, ProcessContext
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import ProcessFailed
from runtime.wire.status_page import StatusPage
from runtime.wire.transport import Waiter, ZmqInbox


def test_a_process_that_fails_says_why_and_leaves_what_it_said_last(tmp_path: Path) -> None:
    """The launcher reads there which sequence ran alone in an engine that has failed."""
    Endpoints(tmp_path).config_file.write_bytes(msgspec.json.encode(LaunchFile(RuntimeConfig(device="cpu"))))
    page = StatusPage(Endpoints(tmp_path).status_file, create=True)
    launcher: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = ZmqInbox(launcher, Endpoints(tmp_path).launcher_in, "launcher_in", 0)
    context = ProcessContext("scheduler", tmp_path, epoch=4)
    context.beat(force=True, solitary=b"s" * 16, num_running=1)
    context.failed("a step failed", 70)
    slot = page.read("scheduler")
    assert (slot.state, slot.epoch, slot.solitary, slot.num_running) == ("failed", 4, b"s" * 16, 1)
    assert Waiter([inbox.socket]).wait(10.0)
    assert inbox.drain() == [ProcessFailed("scheduler", "a step failed", 70)]
    context.close()
    page.close()
    launcher.destroy(linger=0)


def test_who_takes_the_place_of_a_paused_process_shows_the_pause_from_the_start(tmp_path: Path) -> None:
    """Twice, since an engine may end again while it loads."""
    Endpoints(tmp_path).config_file.write_bytes(msgspec.json.encode(LaunchFile(RuntimeConfig(device="cpu"))))
    page = StatusPage(Endpoints(tmp_path).status_file, create=True)
    first = ProcessContext("scheduler", tmp_path, epoch=1)
    assert not first.was_paused
    first.beat(force=True, is_paused=True)
    contexts = [first, *(ProcessContext("scheduler", tmp_path, epoch=epoch) for epoch in (2, 3))]
    last = contexts[-1]
    assert last.was_paused
    last.ready()
    assert page.read("scheduler").is_paused
    last.beat(force=True, is_paused=False)
    assert not page.read("scheduler").is_paused
    for context in contexts:
        context.close()
    page.close()


def test_a_work_loop_that_waits_hears_at_once_that_it_is_to_stop(tmp_path: Path) -> None:
    Endpoints(tmp_path).config_file.write_bytes(msgspec.json.encode(LaunchFile(RuntimeConfig(device="cpu"))))
    page = StatusPage(Endpoints(tmp_path).status_file, create=True)
    context = ProcessContext("scheduler", tmp_path)
    waiter = Waiter([context.stop_wake.fd])
    assert not waiter.wait(0.0)
    context.ask_to_stop()
    assert context.stop.is_set()
    assert waiter.wait(0.0)
    context.close()
    context.ask_to_stop()  # by a signal that comes late
    page.close()


def test_a_poll_sees_the_flag_until_it_is_taken() -> None:
    wake = Wake()
    waiter = Waiter([wake.fd])
    assert (waiter.wait(0.0), wake.take()) == (False, False)
    wake.set()
    wake.set()
    assert (waiter.wait(5.0), wake.take()) == (True, True)
    assert (waiter.wait(0.0), wake.take()) == (False, False)
    wake.close()
    wake.set()


def test_a_thread_that_takes_the_flag_while_another_sets_it_is_not_woken_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The descriptor stayed readable and the flag was down, so it was never read."""
    wake = Wake()
    write = os.eventfd_write

    def write_late(fd: int, value: int) -> None:
        wake.take()
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    wake.set()
    assert Waiter([wake.fd]).wait(5.0)
    assert wake.take()
    assert not Waiter([wake.fd]).wait(0.0)
    wake.close()
