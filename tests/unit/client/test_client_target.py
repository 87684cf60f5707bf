"""Names of a runtime that a user may give."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest

from carousel.client.connection.target import make_target
from runtime.base.errors import ConfigError
from runtime.ring.keys import CLIENT, ServerKeys, make_keys
from runtime.ring.run_dir import RunDir
from tests.harness.cases import for_each


@for_each(
    "address",
    [
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://:5555",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:5555/x",
        "tcp://127.0.0.1:\u0665\u0665\u0665\u0665",  # Arabic digits, which int() would read
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write tcp://HOST:PORT"):
        make_target(address)


def test_an_address_is_read_whole(tmp_path: Path) -> None:
    make_keys(tmp_path)
    target = make_target("tcp://127.0.0.1:5555", tmp_path / CLIENT)
    assert target.client_out(0) == "tcp://127.0.0.1:5555"
    assert target.tokenizer_in(1, 3) == "tcp://127.0.0.1:5559"


@pytest.mark.parametrize("host", ["192.0.2.1", "example.org", "[2001:db8::1]", "0.0.0.0"])
def test_beyond_this_machine_keys_are_named(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="curve_dir: needed"):
        make_target(f"tcp://{host}:5555")
    make_keys(tmp_path)
    target = make_target(f"tcp://{host}:5555", tmp_path / CLIENT)
    assert target.client_out(1) == f"tcp://{host}:5556"


@pytest.fixture
def run_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "runs"
    root.mkdir(mode=0o700)
    monkeypatch.setattr("runtime.ring.run_dir.default_run_root", lambda: root)
    monkeypatch.delenv("CAROUSEL_RUN_DIR", raising=False)
    return root


def serve(run_dir: RunDir, zmq_bind: str, *, makes_keys: bool = True) -> None:
    run_dir.endpoints.state_file.write_bytes(msgspec.json.encode({"zmq_bind": zmq_bind}))
    if makes_keys:
        make_keys(run_dir.endpoints.keys_dir)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_on_this_machine_the_keys_of_this_users_launch_are_found(run_root: Path, host: str) -> None:
    launches = [RunDir() for _ in range(4)]
    for run_dir, zmq_bind in zip(
        launches, ["", "tcp://127.0.0.1:5555", "tcp://127.0.0.1:6666", ""], strict=True
    ):
        serve(run_dir, zmq_bind)
    launches[3].endpoints.state_file.write_bytes(b"{")
    socket = MagicMock()
    make_target(f"tcp://{host}:5555").prepare(socket)
    assert socket.curve_serverkey == ServerKeys.read(launches[1].endpoints.keys_dir).public
    for run_dir in launches:
        run_dir.remove()
    with pytest.raises(
        ConfigError, match=rf"curve_dir: no launch of this user .* tcp://{re.escape(host)}:5555"
    ):
        make_target(f"tcp://{host}:5555")


def test_a_launch_in_a_directory_of_the_environment_is_found(
    run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(str(tmp_path / "elsewhere"))
    serve(run_dir, "tcp://127.0.0.1:5555")
    monkeypatch.setenv("CAROUSEL_RUN_DIR", str(run_dir.path))
    assert make_target("tcp://127.0.0.1:5555")
    run_dir.remove()


def test_a_launch_with_keys_of_its_owner_has_none_to_be_found(run_root: Path) -> None:
    run_dir = RunDir()
    serve(run_dir, "tcp://127.0.0.1:5555", makes_keys=False)
    with pytest.raises(ConfigError, match="curve_dir: no launch of this user that made its own keys"):
        make_target("tcp://127.0.0.1:5555")
    run_dir.remove()
