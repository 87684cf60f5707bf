"""Streams and tickets of the CPU device: the promises that one code path for CPU and CUDA rests on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from model_worker.device import cpu, make_device
from model_worker.device.base import Device
from runtime.base import cgroup
from runtime.base.errors import ConfigError


@pytest.fixture(params=[False, True], ids=["inline", "threaded"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = make_device("cpu", threaded=request.param)
    yield made
    made.close()


def test_work_runs_in_the_order_of_its_launch(device: Device) -> None:
    seen: list[int] = []
    tickets = [device.forward_stream.launch(partial(seen.append, i)) for i in range(100)]
    tickets[-1].wait()
    assert seen == list(range(100))
    assert all(ticket.done() for ticket in tickets)


def test_later_work_reads_the_value_of_earlier_work(device: Device) -> None:
    first = device.forward_stream.launch(lambda: 20)
    second = device.copy_stream.launch(lambda: first.value + 1, after=first)
    assert second.wait() == 21


def test_an_error_reaches_whoever_waits_and_the_stream_goes_on(device: Device) -> None:
    failed = device.forward_stream.launch(lambda: 1 // 0)
    copied = device.copy_stream.launch(lambda: failed.value, after=failed)
    assert device.forward_stream.launch(lambda: "alive").wait() == "alive"
    for ticket in (failed, copied):
        assert ticket.done()
        with pytest.raises(ZeroDivisionError):
            ticket.wait()


def test_threaded_launch_does_not_wait_for_the_work() -> None:
    stream = cpu.ThreadedStream("test")
    gate = threading.Event()
    ticket = stream.launch(gate.wait)
    assert not ticket.done()
    gate.set()
    assert ticket.wait()
    stream.close()


def test_threaded_work_waits_for_the_ticket_it_comes_after() -> None:
    one, other = cpu.ThreadedStream("one"), cpu.ThreadedStream("other")
    gate, ran = threading.Event(), threading.Event()
    first = one.launch(gate.wait)
    second = other.launch(ran.set, after=first)
    assert not ran.wait(timeout=0.01)
    gate.set()
    second.wait()
    assert ran.is_set()
    one.close()
    other.close()


def test_close_finishes_what_was_launched_and_may_be_repeated() -> None:
    stream = cpu.ThreadedStream("test")
    done: list[int] = []
    for i in range(10):
        stream.launch(partial(done.append, i))
    stream.close()
    stream.close()
    assert done == list(range(10))


def test_inline_work_is_done_when_launch_returns() -> None:
    assert cpu.InlineStream().launch(lambda: 5).done()


def test_free_memory_respects_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = make_device("cpu", threaded=False)
    monkeypatch.setattr(cgroup, "CGROUPS", tmp_path)
    monkeypatch.setattr(cgroup, "OWN_GROUPS", tmp_path / "own")
    of_the_machine = device.free_bytes()
    assert of_the_machine > 0
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert device.free_bytes() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert device.free_bytes() > 3000


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        make_device("tpu", threaded=False)
