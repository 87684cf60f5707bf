"""Placement that Ray is asked for, and the errors where it is not installed or has no cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.child import OOM_SCORE_FILE
from runtime.launcher.command_line import parse_args
from runtime.launcher.nodes import ray_placer
from runtime.launcher.nodes.ray_nodes import Placement, RayNodes, placement_of
from runtime.launcher.nodes.ray_placer import Placer, take_oom_score_of
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from tests.harness.ring.launched import is_alive, wait_until

ASKED = [
    *("--model", str(DEMO_MODEL), "--executor", "ray", "--nnodes", "2", "--tp-size", "4", "--device", "cpu"),
    *("--dist-addr", "127.0.0.2:29500", "--cpu-threads", "3", "--page-size", "8", "--deterministic"),
    *("--api-key", "secret", "--port", "1234", "--cuda-graph-bs", "1,2", "--run-dir", "/tmp/here"),
]
CAP_SYS_NICE = 23
PLACEMENT = Placement(num_nodes=2, cpus=3, words=[], is_loopback=True, timeout_s=1.0)


def test_agents_get_the_settings_of_the_engine_and_nothing_of_http() -> None:
    asked = parse_args(ASKED)
    placement = placement_of(asked, asked)
    assert (placement.num_nodes, placement.cpus, placement.is_loopback) == (2, 6, True)
    assert not any("secret" in word or "1234" in word or "/tmp/here" in word for word in placement.words)
    agent = parse_args([*placement.words, "--node-rank=1"])
    expected = msgspec.structs.replace(
        RuntimeConfig(),
        **{
            name: getattr(asked, name)
            for name in ("model", "nnodes", "tp_size", "device", "dist_addr", "cpu_threads", "page_size")
        },
        deterministic=True,
        cuda_graph_bs=asked.cuda_graph_bs,
        executor="nodes",
        node_rank=1,
    )
    assert agent == expected


def test_an_agent_has_the_niceness_and_the_oom_score_of_the_raylet_and_not_of_rays_workers() -> None:
    """Where this user may not lower the niceness, that is said with what helps. A score that somebody without
    the right to lower it has raised may be lowered again.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)
    lines = (
        "import os",
        "from runtime.launcher.child import OOM_SCORE_FILE, raise_oom_score",
        "from runtime.launcher.nodes.ray_placer import take_niceness_of, take_oom_score_of",
        "os.nice(3)",
        "raise_oom_score(1000)",
        "take_niceness_of(os.getppid())",
        "take_oom_score_of(os.getppid())",
        "print(os.getpriority(os.PRIO_PROCESS, 0), OOM_SCORE_FILE.read_text())",
    )
    command = (sys.executable, "-c", "\n".join(lines))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    is_said = "set RAY_worker_niceness=0 for `ray start`" in done.stderr
    niceness, oom_score = map(int, done.stdout.split())
    assert niceness == own + (3 if is_said else 0)
    assert not (is_said and _may_lower_niceness())
    assert oom_score == int(OOM_SCORE_FILE.read_text())
    assert "OOM score" not in done.stderr


def test_an_oom_score_that_cannot_be_lowered_is_said_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class ReadOnly(type(tmp_path)):  # type: ignore[misc]
        def write_text(self, *_: Any, **__: Any) -> int:
            raise PermissionError

    file = ReadOnly(tmp_path / "oom_score_adj")
    (tmp_path / "oom_score_adj").write_text("1000\n")
    monkeypatch.setattr(ray_placer, "OOM_SCORE_FILE", file)
    take_oom_score_of(os.getpid())
    assert "the OOM score 1000 of Ray's workers" in capsys.readouterr().err


def _may_lower_niceness() -> bool:
    """Return True if this process has the capability; in some containers root has not."""
    mask = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
    return bool(mask >> CAP_SYS_NICE & 1)


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'carousel\[ray\]'"):
        Placer(PLACEMENT)


class FakeRay:
    """Ray, as far as it says that it cannot."""

    def __init__(self, *, has_cluster: bool) -> None:
        self._has_cluster = has_cluster
        self.removed: list[Any] = []

    def init(self, **options: Any) -> None:
        assert options["address"] == "auto", "a cluster of its own would be started"
        if not self._has_cluster:
            raise ConnectionError("Could not find any running\nRay instance")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": alive, "Resources": {"CPU": cpus}} for alive, cpus in ((True, 8), (True, 2), (False, 8))
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 9.0}

    def shutdown(self) -> None:
        pass


def fake(monkeypatch: pytest.MonkeyPatch, *, has_cluster: bool = True) -> FakeRay:
    ray = FakeRay(has_cluster=has_cluster)
    util = SimpleNamespace(
        get_node_ip_address=lambda: "127.0.0.2",
        placement_group=lambda bundles, strategy: SimpleNamespace(wait=lambda timeout_s: False),
        remove_placement_group=ray.removed.append,
    )
    for name, module in (("ray", ray), ("ray.util", util), ("ray.util.scheduling_strategies", None)):
        monkeypatch.setitem(sys.modules, name, module or SimpleNamespace())
    return ray


def test_no_cluster_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, has_cluster=False)
    with pytest.raises(ConfigError, match="there is no cluster: Could not find any running Ray instance"):
        Placer(PLACEMENT)


def test_a_group_that_waits_says_what_is_missing_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake(monkeypatch)
    placer = Placer(PLACEMENT)
    with pytest.raises(ConfigError, match="2 machines with 3 CPUs each") as caught:
        placer.place()
    assert "the cluster has 2 machines, 1 of them with so many CPUs, and 9 CPUs are free" in str(caught.value)
    placer.close()
    assert len(ray.removed) == 1


def test_a_launch_that_cannot_be_placed_ends_with_what_ray_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real process between them; nobody listens at that address, if Ray is there."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    asked = msgspec.structs.replace(parse_args(ASKED), start_timeout=1.0)
    with pytest.raises(ConfigError, match=r"^executor: ray"):
        RayNodes(asked, asked)


PLACER_THAT_WRITES = """
import os, sys
with open(sys.argv[1], "a") as log:
    log.write(f"{os.getpid()} {sys.stdin.readline()}")
gone = os.path.exists(sys.argv[1] + ".gone")
print('{"error": "ray: gone"}' if gone else '{"addresses": ["127.0.0.3"]}', flush=True)
gone or sys.stdin.read()
"""


def test_agents_are_placed_again_when_the_process_that_asks_ray_has_ended(tmp_path: Path) -> None:
    """Their actors end with it. The group that it is told is the same one."""
    log = tmp_path / "log"
    log.touch()
    asked = parse_args(ASKED)

    def told() -> list[list[str]]:
        return [line.split(" ", 1) for line in log.read_text().splitlines()]

    command = (sys.executable, "-c", PLACER_THAT_WRITES, str(log))
    with RayNodes(asked, asked, command, again_s=0.01):
        for number in (1, 2):
            assert len(told()) == number
            os.kill(int(told()[-1][0]), signal.SIGKILL)
            wait_until(lambda: len(told()) > number, 5.0, "it is started again")  # noqa: B023
    assert len({placement for _, placement in told()}) == 1
    assert msgspec.json.decode(told()[0][1], type=Placement) == placement_of(asked, asked)
    assert not any(is_alive(int(pid)) for pid, _ in told())


def test_what_cannot_be_placed_again_at_once_is_tried_until_it_can(tmp_path: Path) -> None:
    """A cluster whose head has ended comes back later, or the launch waits for its nodes in vain."""
    log = tmp_path / "log"
    log.touch()
    asked = parse_args(ASKED)
    command = (sys.executable, "-c", PLACER_THAT_WRITES, str(log))
    with RayNodes(asked, asked, command, again_s=0.01):
        (tmp_path / "log.gone").touch()
        os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
        wait_until(lambda: len(log.read_text().splitlines()) >= 3, 5.0, "it is tried again")
        (tmp_path / "log.gone").unlink()
