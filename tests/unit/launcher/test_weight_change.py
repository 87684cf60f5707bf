"""A change of weights as the launcher goes through it: answers, phases, and the launch file meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from runtime.base.errors import InvalidRequest
from runtime.launcher.weights import updates
from runtime.launcher.weights.updates import WeightUpdates
from runtime.ring.endpoints import Endpoints
from runtime.ring.process import FIRST_EPOCH, LaunchFile
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import ControlReply, ControlRequest, ErrorInfo, GiveWay
from runtime.wire.plan import WeightsUpdate
from runtime.wire.transport import Waiter, ZmqInbox

WAIT_S = 30.0
CLIENT, EPOCH = 8, 3


def asked(number: int = 1, path: str = "step-1", **about: Any) -> ControlRequest:
    return ControlRequest(CLIENT, number, "update_weights", weights=WeightsUpdate(path, **about))


class Change:
    """The updates of a launch that serves "step-0", between a scheduler and a detokenizer."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.endpoints = Endpoints(run_dir)
        self.context = zmq.Context()
        self.woken = threading.Event()
        self.may_look = threading.Event()
        self.may_look.set()
        self._detokenizer = self._bind("detokenizer_in", self.endpoints.detokenizer_in())
        self._scheduler = self._bind("scheduler_in", self.endpoints.scheduler_in)
        config = RuntimeConfig(model="/w/step-0", weights_dir="/w", weight_version="first")
        self.updates = WeightUpdates(config, self.endpoints, self.context)
        self.updates.wake = self.woken.set
        self.updates.write_launch()
        monkeypatch.setattr(updates, "check_new_weights", self._look)

    def _bind(self, name: str, address: str) -> ZmqInbox:
        return ZmqInbox(self.context, address, name, FIRST_EPOCH)

    def _look(self, config: RuntimeConfig, path: str) -> str:
        assert self.may_look.wait(WAIT_S)
        if path == "bad":
            raise InvalidRequest("model_path: no", param="model_path", code="invalid_weights")
        if path == "odd":
            raise ZeroDivisionError
        return f"{config.weights_dir}/{path}"

    def turn(self, *, is_whole: bool = True, may_begin: bool = True) -> None:
        self.updates.turn(EPOCH, is_whole=is_whole, may_begin=may_begin)

    def ask(self, request: ControlRequest, *, may_begin: bool = True) -> None:
        self.updates.receive(request, may_begin=may_begin)

    def looked(self, request: ControlRequest) -> None:
        """Begin a change, up to the turn after the look at the checkpoint."""
        self.woken.clear()
        self.ask(request)
        assert self.woken.wait(WAIT_S)
        self.turn()

    def loaded(self, request: ControlRequest) -> None:
        """Make the change, up to the end of the old engine."""
        self.looked(request)
        assert self.given_way() == GiveWay(EPOCH, request.weights is not None and request.weights.aborts)
        self.updates.engine_ended("scheduler: exited with code 0")

    def given_way(self) -> GiveWay:
        message: GiveWay = self._next(self._scheduler)
        return message

    def reply(self) -> ControlReply:
        message: ControlReply = self._next(self._detokenizer)
        return message

    def error(self) -> ErrorInfo:
        reply = self.reply()
        assert not reply.ok
        return msgspec.msgpack.decode(reply.body, type=ErrorInfo)

    def _next(self, inbox: ZmqInbox) -> Any:
        assert Waiter([inbox.socket]).wait(WAIT_S)
        (message,) = inbox.drain()
        return message

    @property
    def is_quiet(self) -> bool:
        """True if no reply has come."""
        return not self._detokenizer.drain()

    def launch(self) -> tuple[str, str]:
        """Model and version that the next process would be started with."""
        config = LaunchFile.read(self.endpoints.config_file).config
        assert config == self.updates.config
        return config.model, config.weight_version


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Change]:
    change = Change(tmp_path, monkeypatch)
    yield change
    change.context.destroy(linger=0)


def test_the_launch_file_changes_between_the_end_and_the_start_of_an_engine(change: Change) -> None:
    secret = LaunchFile.read(change.endpoints.config_file).secret
    change.looked(asked(version="second"))
    assert (change.launch(), change.updates.phase) == (("/w/step-0", "first"), "leaving")
    assert change.updates.engine_ended("scheduler: it ended") == "weights second from /w/step-1"
    assert change.launch() == ("/w/step-1", "second")
    assert LaunchFile.read(change.endpoints.config_file).secret == secret
    assert change.is_quiet
    change.updates.engine_ready()
    reply = change.reply()
    body = msgspec.msgpack.decode(reply.body)
    assert (reply.client, reply.number, reply.ok) == (CLIENT, 1, True)
    assert {**body, "seconds": 0} == {"model_path": "/w/step-1", "weight_version": "second", "seconds": 0}
    assert change.updates.phase == "idle"


def test_a_version_is_called_like_its_directory_by_default(change: Change) -> None:
    change.loaded(asked(aborts=True))
    assert change.launch() == ("/w/step-1", "step-1")


@pytest.mark.parametrize(
    ("path", "code", "status"), [("bad", "invalid_weights", 400), ("odd", "internal_error", 500)]
)
def test_a_bad_checkpoint_ends_nothing(change: Change, path: str, code: str, status: int) -> None:
    change.looked(asked(path=path))
    error = change.error()
    assert (error.code, error.status, change.updates.phase) == (code, status, "idle")
    assert change.launch() == ("/w/step-0", "first")
    change.loaded(asked(2))
    assert change.launch()[0] == "/w/step-1"


def test_an_engine_that_does_not_get_ready_is_followed_by_one_with_the_old_weights(change: Change) -> None:
    change.loaded(asked())
    assert change.updates.awaits_end
    change.updates.engine_ended("worker: no memory")
    assert (change.launch(), change.updates.phase) == (("/w/step-0", "first"), "going back")
    assert not change.updates.awaits_end, "a further death is one like any other"
    assert change.is_quiet
    change.updates.engine_ready()
    error = change.error()
    assert (error.code, "worker: no memory" in error.message) == ("weights_not_loaded", True)
    change.loaded(asked(2, "step-2"))
    change.updates.engine_ready()
    assert (change.reply().ok, change.launch()) == (True, ("/w/step-2", "step-2"))


def test_a_run_directory_that_cannot_be_written_keeps_the_old_weights(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError("no space")

    change.looked(asked())
    monkeypatch.setattr(updates, "write_atomically", refuse)
    change.updates.engine_ended("scheduler: it ended")
    assert (change.launch(), change.updates.phase) == (("/w/step-0", "first"), "going back")
    change.updates.engine_ready()
    assert "no space" in change.error().message


def test_one_at_a_time_and_one_that_is_repeated_is_answered_once_more(change: Change) -> None:
    """A client sends its call again when the engine was replaced, also by this very call."""
    change.may_look.clear()
    change.ask(asked())
    change.ask(asked())
    change.ask(asked(2))
    assert (change.error().code, change.updates.phase) == ("update_in_progress", "checking")
    change.may_look.set()
    assert change.woken.wait(WAIT_S)
    change.turn()
    change.updates.engine_ended("scheduler: it ended")
    change.ask(asked())
    change.updates.engine_ready()
    first = change.reply()
    change.ask(asked())
    assert change.reply() == first
    assert change.updates.phase == "idle"


def test_an_engine_goes_when_all_is_ready_and_not_when_the_launch_ends(change: Change) -> None:
    change.ask(asked())
    assert change.woken.wait(WAIT_S)
    change.turn(is_whole=False)
    assert (change.updates.phase, change.updates.is_overdue) == ("checked", False)
    change.turn(is_whole=False, may_begin=False)
    assert (change.error().code, change.updates.phase) == ("not_ready", "idle")
    change.ask(asked(2), may_begin=False)
    assert (change.error().code, change.updates.phase) == ("not_ready", "idle")


def test_an_engine_that_does_not_go_is_overdue(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "GIVE_WAY_S", -1.0)
    change.looked(asked())
    assert (change.updates.phase, change.updates.is_overdue) == ("leaving", True)
    change.updates.engine_ended("scheduler: was killed by SIGKILL")
    assert (change.updates.phase, change.updates.is_overdue) == ("trying", False)


def test_without_the_setting_nothing_begins(change: Change) -> None:
    change.updates = WeightUpdates(RuntimeConfig(), change.endpoints, change.context)
    change.ask(asked())
    assert (change.error().status, change.updates.phase) == (403, "idle")


def test_a_call_without_weights_is_refused(change: Change) -> None:
    change.ask(ControlRequest(CLIENT, 3, "update_weights"))
    assert (change.error().param, change.updates.phase) == ("weights", "idle")
