"""Placement that Ray is asked for, and the errors where it is not installed or has no cluster."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.command_line import parse_args
from runtime.launcher.nodes.ray_nodes import Placement, RayNodes, placement_of
from runtime.launcher.nodes.ray_placer import Placer
from runtime.settings.config import DEMO_MODEL, RuntimeConfig

ASKED = [
    *("--model", str(DEMO_MODEL), "--executor", "ray", "--nnodes", "2", "--tp-size", "4", "--device", "cpu"),
    *("--dist-addr", "127.0.0.2:29500", "--cpu-threads", "3", "--page-size", "8", "--deterministic"),
    *("--api-key", "secret", "--port", "1234", "--cuda-graph-bs", "1,2", "--run-dir", "/tmp/here"),
]
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
