"""The manifest for LeaderWorkerSet: by the schema, and by what our own command line makes of it in a pod."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from runtime.launcher.command_line import parse_args
from runtime.launcher.nodes.starters import with_starter
from runtime.ring.nodes import NodeKeys
from tests.harness.cases import for_each

ROOT = Path(__file__).resolve().parents[3]
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads(Path(__file__).with_name("leaderworkerset_schema.json").read_text())
)


@pytest.fixture
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / "leaderworkerset" / "carousel.yaml").read_text()))


@pytest.fixture
def pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = documents[0]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    return spec


def test_the_manifest_is_what_the_schema_says(documents: list[dict[str, Any]]) -> None:
    VALIDATOR.check_schema(VALIDATOR.schema)
    VALIDATOR.validate(documents[0])


@for_each(
    ("path", "value"),
    [
        (("leaderWorkerTemplate", "restartPolicy"), "Never"),
        (("leaderWorkerTemplate", "size"), "2"),
        (("leaderWorkerTemplate", "workers"), 1),
        (("startupPolicy",), "Ready"),
        (("leaderWorkerTemplate", "workerTemplate", "spec", "containers"), []),
        (("leaderWorkerTemplate", "workerTemplate", "spec", "volumes"), [{"name": "a", "secret": "a"}]),
    ],
)
def test_the_schema_refuses_what_is_none(
    documents: list[dict[str, Any]], path: tuple[str, ...], value: Any
) -> None:
    wrong = copy.deepcopy(documents[0])
    place = wrong["spec"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(wrong)


def test_each_pod_knows_which_node_it_is(documents: list[dict[str, Any]], pod: dict[str, Any]) -> None:
    """Each by the same arguments, of which each is one of ours, and the environment that it is given."""
    size = documents[0]["spec"]["leaderWorkerTemplate"]["size"]
    config = parse_args(pod["containers"][0]["args"])
    for rank in range(size):
        found = with_starter(
            config,
            {
                "LWS_GROUP_SIZE": str(size),
                "LWS_WORKER_INDEX": str(rank),
                "LWS_LEADER_ADDRESS": "carousel-0.carousel.default",
            },
        )
        assert (found.nnodes, found.node_rank) == (size, rank)
        assert found.dist_addr == "carousel-0.carousel.default"
        assert found.tp_size % size == 0
        assert found.trusted_network
        assert found.api_key_file, "whoever reaches the port may ask"


def test_mounts_ports_and_service_belong_together(
    documents: list[dict[str, Any]], pod: dict[str, Any]
) -> None:
    (container,), service = pod["containers"], documents[1]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    config = parse_args(container["args"])
    for path, volume in ((config.node_key, "nodes"), (config.api_key_file, "api"), (config.model, "models")):
        assert path.startswith(f"{mounts[volume]}/")
    (port,), (served,) = container["ports"], service["spec"]["ports"]
    assert config.port == port["containerPort"] == served["port"]
    assert served["targetPort"] == port["name"]
    assert f":{config.port}/ready" in container["readinessProbe"]["exec"]["command"][-1]
    name = documents[0]["metadata"]["name"]
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/name"] == name


def test_a_secret_is_read_as_kubernetes_mounts_it(pod: dict[str, Any], tmp_path: Path) -> None:
    """A link to a link, of the mode that the manifest names."""
    (mode,) = {volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume}
    assert stat.filemode(stat.S_IFREG | mode) == "-r--------"
    (tmp_path / "..first").mkdir()
    (tmp_path / "..first" / "node.key").write_text("0123456789abcdef" * 4)
    (tmp_path / "..first" / "node.key").chmod(mode)
    (tmp_path / "..data").symlink_to("..first")
    (tmp_path / "node.key").symlink_to(os.path.join("..data", "node.key"))
    NodeKeys.read(str(tmp_path / "node.key"))


def test_the_probe_of_a_worker_asks_nobody_and_the_leaders_fails_without_a_server(
    pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = pod["containers"][0]["readinessProbe"]["exec"]["command"][-1].replace(":30000", ":9")
    monkeypatch.setenv("LWS_WORKER_INDEX", "1")
    exec(program, {})
    monkeypatch.setenv("LWS_WORKER_INDEX", "0")
    with pytest.raises(OSError, match="refused"):
        exec(program, {})
