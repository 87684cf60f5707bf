"""A run replays to the step from what its port was given: in a new process, with another hash seed and with
objects at other places.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.simulation.replay import Diverged, Recording, record, replay
from tests.harness.sources import ROOT

NUM_RUNS = 100
SMALL = {"num_requests": 7, "max_output": 12}
"""Size of the runs that `make test` replays; each is a part of a second."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The random policy raises on purpose, and every such step is logged."""
    caplog.set_level(logging.CRITICAL)


def replay_elsewhere(recordings: list[Recording], file: Path) -> None:
    file.write_bytes(pickle.dumps(recordings))
    seed = int(os.environ.get("PYTHONHASHSEED", "random").replace("random", "0")) + 1
    ended = subprocess.run(
        [sys.executable, "-m", "tests.harness.simulation.replay", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    num_runs, num_plans, hashed = map(int, ended.stdout.split())
    assert hashed != hash("another order"), "the same hash seed"
    assert (num_runs, num_plans) == (len(recordings), sum(len(each.plans) for each in recordings))


def check_traffic(recordings: list[Recording]) -> None:
    kinds = Counter(kind for each in recordings for kind, _ in each.events)
    assert {"time", "drained", "sent", "result", "ready", "tenants", "adapters"} <= set(kinds)
    assert any(value is False for each in recordings for kind, value in each.events if kind == "sent")
    assert any(value is False for each in recordings for kind, value in each.events if kind == "ready")
    assert any(each.setting.policy == "random" for each in recordings)


def test_recorded_runs_replay_to_the_step_in_another_process(tmp_path: Path) -> None:
    recordings = [record(seed, **SMALL) for seed in range(NUM_RUNS)]
    check_traffic(recordings)
    replay_elsewhere(recordings, tmp_path / "runs")


@pytest.mark.full
def test_runs_of_the_simulations_length_do_as_well(tmp_path: Path) -> None:
    replay_elsewhere([record(seed) for seed in range(1000, 1000 + NUM_RUNS)], tmp_path / "runs")


def test_another_seed_or_another_answer_is_noticed() -> None:
    recording = record(1, **SMALL, policy="random", max_rows=2)
    replay(recording)
    at = min(i for i, (kind, value) in enumerate(recording.events) if kind == "sent" and value)
    recording.events[at] = ("sent", False)
    with pytest.raises(Diverged):
        replay(recording)
    recording.events[at] = ("sent", True)
    recording.rng_seed += 1
    with pytest.raises(Diverged):
        replay(recording)
