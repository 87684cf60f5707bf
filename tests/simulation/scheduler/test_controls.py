"""Pause, go on and profile: a scheduler that is told to stop loses nothing, and shows where its time goes."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.wire.messages import MAX_PROFILE_STEPS, ControlRequest, ErrorInfo, PauseMode
from runtime.wire.plan import BatchPlan, StepResult, StepSpan
from scheduler_proc.loop import PAUSED_S, SchedulerLoop
from scheduler_proc.observe import step_profile
from scheduler_proc.observe.step_profile import StepProfile
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import System

REQUESTS = [message(number, [number] * 9, max_tokens=12) for number in range(6)]
"""More than there are rows."""


def outputs(system: System) -> dict[bytes, list[int]]:
    return {each.handle: list(system.detokenizer.tokens.get(each.handle, ())) for each in REQUESTS}


def tell(system: System, op: Any, **about: Any) -> Any:
    """The answer to a control call, after the step that gave it."""
    system.inbox.send(ControlRequest(7, 1, op, **about))
    system.step()
    reply = system.detokenizer.replies[-1]
    return msgspec.msgpack.decode(reply.body, type=Any if reply.ok else ErrorInfo)


@pytest.fixture(scope="module")
def undisturbed() -> dict[bytes, list[int]]:
    with running() as system:
        run_until_idle(system, *REQUESTS)
        return outputs(system)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_pause_changes_no_output(
    undisturbed: dict[bytes, list[int]], depth: int, mode: PauseMode, num_steps: int
) -> None:
    with running(depth=depth) as system:
        for each in REQUESTS[:5]:
            system.inbox.send(each)
        for _ in range(num_steps):
            system.step()
        answer = tell(system, "pause_generation", mode=mode)
        assert answer["is_paused"] is True
        assert not system.scheduler.in_flight
        num_rows = 0 if mode == "retract" else min(4, 4 * num_steps)
        assert (answer["num_running"], answer["num_waiting"]) == (num_rows, 5 - num_rows)
        said, launched = outputs(system), system.scheduler.num_steps

        system.inbox.send(REQUESTS[5])
        for _ in range(10):
            system.step()
        assert (outputs(system), system.scheduler.num_steps) == (said, launched)
        assert len(system.lifecycle.requests) == 6
        if mode == "retract":
            system.kv.flush()
            assert system.kv.pages.num_free == system.kv.pages.num_pages

        assert tell(system, "continue_generation")["is_paused"] is False
        run_until_idle(system)
        assert outputs(system) == undisturbed
        system.check_empty()


def test_a_pause_that_aborts_ends_all_and_what_comes_later_waits() -> None:
    with running() as system:
        for each in REQUESTS[:5]:
            system.inbox.send(each)
        system.step()
        assert tell(system, "pause_generation", mode="abort")["num_waiting"] == 0
        assert system.scheduler.is_idle
        system.inbox.send(REQUESTS[5])
        system.step()
        assert not system.scheduler.is_idle
        tell(system, "continue_generation")
        run_until_idle(system)
        assert len(system.detokenizer.tokens[REQUESTS[5].handle]) == 12
        system.check_empty()


def test_deadlines_and_aborts_hold_during_a_pause_and_the_loop_does_not_spin() -> None:
    with running() as system:
        loop = SchedulerLoop(system.scheduler)
        system.inbox.send(message(1, [1] * 8, max_tokens=40, deadline_s=system.now + 0.2))
        system.step()
        tell(system, "pause_generation")
        assert loop.turn() == PAUSED_S
        assert loop.status()["is_paused"] is True
        while not system.scheduler.is_idle:  # each step is a hundredth of a second
            system.step()
        assert system.now < 1.5
        system.check_empty()


# -- profile -----------------------------------------------------------------------------------------------


class TimedWorker:
    """Stands before an executor whose worker takes no times: each profiled step has had a forward."""

    def __init__(self, system: System) -> None:
        self._executor = system.scheduler.executor
        self.max_in_flight, self.feeds_back = self._executor.max_in_flight, self._executor.feeds_back
        system.scheduler.executor = self

    def launch(self, plan: BatchPlan) -> Any:
        handle = self._executor.launch(plan)
        return TimedHandle(handle) if plan.profiled else handle

    def sample(self, handle: Any, masks: Any) -> None:
        raise AssertionError("nothing is deferred here")

    def close(self) -> None:
        self._executor.close()


class TimedHandle:
    frames = ()

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def done(self) -> bool:
        return bool(self._handle.done())

    def result(self) -> StepResult:
        result: StepResult = self._handle.result()
        return msgspec.structs.replace(result, spans=(StepSpan("forward", 1000, 3000),))


def with_profile(system: System, directory: Path | None) -> None:
    system.scheduler.controls.profile = system.scheduler.profile = StepProfile(directory, system.port)
    TimedWorker(system)


def spans_of(path: Path) -> list[tuple[str, str]]:
    """(process, name) of each span; they follow one another and do not overlap."""
    trace = json.loads(path.read_bytes())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    tracks = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    spans = [event for event in trace if event["ph"] == "X"]
    for track in ("turns", "steps"):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if tracks[e["tid"]] == track)
        assert own
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in itertools.pairwise(own))
    return [(names[event["pid"]], event["name"]) for event in spans]


def test_a_profile_ends_by_itself_with_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    with running(depth=2) as system:
        with_profile(system, tmp_path)
        begun = tell(system, "start_profile", num_steps=5)
        assert begun["num_steps"] == 5
        run_until_idle(system, *REQUESTS)
        assert not system.scheduler.profile.is_on
        spans = spans_of(tmp_path / begun["file"])
        assert spans.count(("worker", "forward")) == spans.count(("scheduler", "step")) == 5
        for name in ("build", "launch", "wait", "commit", "flush"):
            assert spans.count(("scheduler", name)) >= 5, name
        assert [tmp_path / begun["file"]] == list(tmp_path.iterdir())
        assert tell(system, "stop_profile").code == "no_profile"


def test_a_profile_can_be_stopped_and_only_one_is_taken_at_a_time(tmp_path: Path) -> None:
    with running() as system:
        with_profile(system, tmp_path)
        begun = tell(system, "start_profile")
        assert begun["num_steps"] == MAX_PROFILE_STEPS
        refused = tell(system, "start_profile", num_steps=3)
        assert (refused.code, refused.status) == ("profile_running", 409)
        run_until_idle(system, REQUESTS[0])
        ended = tell(system, "stop_profile")
        assert ended == {"file": begun["file"], "num_steps": 12}
        assert spans_of(tmp_path / ended["file"]).count(("worker", "forward")) == 12
        assert tell(system, "start_profile")["file"] != ended["file"]


def test_a_profile_ends_where_messages_alone_would_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns in which the scheduler only receives count no steps."""
    monkeypatch.setattr(step_profile, "MAX_EVENTS", 50)
    with running() as system:
        with_profile(system, tmp_path)
        tell(system, "start_profile")
        for _ in range(50):
            tell(system, "server_info")
        assert not system.scheduler.profile.is_on
        assert tell(system, "stop_profile").code == "no_profile"


def test_a_profile_begins_when_it_is_asked_for(tmp_path: Path) -> None:
    """The turn of the loop that was told to begin it had begun at 0 in it."""
    with running() as system:
        with_profile(system, tmp_path)
        tell(system, "start_profile")
        file = tell(system, "stop_profile")["file"]
        trace = json.loads((tmp_path / file).read_bytes())
    spans = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert spans
    assert min(spans) >= trace["otherData"]["begun_us"]


def test_the_last_profiles_are_kept_and_no_other_file_goes(tmp_path: Path) -> None:
    (tmp_path / "profile-20260101-000000-1.json").write_text("of an earlier launch")
    files = []
    with running() as system:
        with_profile(system, tmp_path)
        for _ in range(6):
            files.append(tell(system, "start_profile")["file"])
            tell(system, "stop_profile")
    assert len(set(files)) == 6
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {*files[-4:], "profile-20260101-000000-1.json"}


def test_two_launches_may_have_the_same_directory_for_profiles(tmp_path: Path) -> None:
    """Asked for by one line of a script, in the same second; the second one's was lost."""
    with running() as one, running() as other:
        for system in (one, other):
            with_profile(system, tmp_path)
        begun = [tell(system, "start_profile")["file"] for system in (one, other)]
        ended = [tell(system, "stop_profile")["file"] for system in (one, other)]
        assert begun == ended
        assert len({*begun}) == 2
        for file in begun:
            assert "otherData" in json.loads((tmp_path / file).read_bytes())


def test_a_profile_that_cannot_be_written_hurts_nobody(tmp_path: Path) -> None:
    with running() as system:
        assert tell(system, "start_profile").code == "no_profile_dir"
        folder = tmp_path / "gone"
        with_profile(system, folder)
        losses = [tell(system, "start_profile", num_steps=2)]
        folder.mkdir()
        tell(system, "start_profile", num_steps=2)
        shutil.rmtree(folder)
        run_until_idle(system, REQUESTS[0])
        folder.mkdir()
        tell(system, "start_profile")
        shutil.rmtree(folder)
        losses.append(tell(system, "stop_profile"))
        for lost in losses:
            assert (lost.code, lost.status) == ("profile_lost", 500)
            assert str(tmp_path) not in lost.message, "the caller is told no paths"
        run_until_idle(system, REQUESTS[1])
        system.check_empty()
