"""A client over TCP: addresses, keys, and how it sees that the ring has gone."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from zmq.auth import create_certificates

from carousel import AsyncClient, Client, ConfigError, RingClosed, SamplingParams
from runtime.wire.messages import GenerateRequest, SequenceOutput
from runtime.wire.status_page import RingStatus
from tests.harness.ring.fake_ring import WAIT_S, FakeRing, TcpDoor, fake_ring, finish, output
from tests.harness.ring.launched import SLACK, wait_until

NUM_TOKENIZERS = 2
NUM_DETOKENIZERS = 2


@pytest.fixture(autouse=True)
def _short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carousel.client.core.ring_state.TICK_S", 0.01)


def echo(request: GenerateRequest) -> list[SequenceOutput]:
    return [
        output(request, f"{request.text}.{index}", index=index, finish=finish())
        for index in range(request.sampling.n)
    ]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """server/ and its clients/, and client/ for the one that may come."""
    root = tmp_path_factory.mktemp("keys")
    for name in ("server/clients", "client", "stranger"):
        (root / name).mkdir(parents=True)
    create_certificates(root / "server", "server")
    for name in ("client", "stranger"):
        create_certificates(root / name, "client")
        (root / name / "client.key_secret").chmod(0o600)
        (root / name / "server.key").write_bytes((root / "server/server.key").read_bytes())
    (root / "server/clients/one.key").write_bytes((root / "client/client.key").read_bytes())
    return root


@pytest.fixture
def door(keys: Path) -> TcpDoor:
    return TcpDoor(NUM_TOKENIZERS + NUM_DETOKENIZERS, keys / "server")


def address(door: TcpDoor) -> str:
    return f"tcp://127.0.0.1:{door.port}"


def ring_at(tmp_path: Path, door: TcpDoor) -> AbstractContextManager[FakeRing]:
    return fake_ring(
        tmp_path, echo, num_tokenizers=NUM_TOKENIZERS, num_detokenizers=NUM_DETOKENIZERS, door=door
    )


def test_a_client_with_a_key_is_served_by_all_ports(tmp_path: Path, keys: Path, door: TcpDoor) -> None:
    with (
        ring_at(tmp_path, door) as ring,
        Client(address(door), curve_dir=keys / "client", connect_timeout=WAIT_S) as client,
    ):
        completions = client.generate(["a", "b", "c", "d"], SamplingParams(n=2), timeout=WAIT_S)
        assert [each.outputs[1].text for each in completions] == ["a.1", "b.1", "c.1", "d.1"]
        assert {number for number, _ in ring.arrivals} == set(range(NUM_TOKENIZERS))
        assert [hello.wants_status for hello in ring.hellos] == [True] * NUM_DETOKENIZERS


def test_an_asynchronous_client_with_a_key_is_served(tmp_path: Path, keys: Path, door: TcpDoor) -> None:
    async def main() -> None:
        client = AsyncClient(address(door), curve_dir=str(keys / "client"), connect_timeout=WAIT_S)
        async with client:
            assert (await client.generate("a", timeout=WAIT_S)).text == "a.0"

    with ring_at(tmp_path, door):
        asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_loopback_address_is_served_by_either_name(tmp_path: Path, keys: Path, host: str) -> None:
    door = TcpDoor(2, keys / "server")
    where = f"tcp://{host}:{door.port}"
    with (
        fake_ring(tmp_path, echo, door=door),
        Client(where, curve_dir=keys / "client", connect_timeout=WAIT_S) as client,
    ):
        assert client.generate("a", timeout=WAIT_S).text == "a.0"


def test_closing_leaves_no_thread_and_no_file_descriptor(tmp_path: Path, keys: Path) -> None:
    door = TcpDoor(2, keys / "server")
    with fake_ring(tmp_path, echo, door=door):
        Client(address(door), curve_dir=keys / "client", connect_timeout=WAIT_S).close()
        threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with Client(address(door), curve_dir=keys / "client", connect_timeout=WAIT_S) as client:
                client.generate("x", timeout=WAIT_S)
        assert threading.active_count() == threads
        # The fake ring's end of a connection closes a moment after ours.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds, WAIT_S, "all is closed")


def test_a_key_that_the_server_does_not_know_is_not_answered(
    tmp_path: Path, keys: Path, door: TcpDoor
) -> None:
    with ring_at(tmp_path, door) as ring:
        with pytest.raises(RingClosed, match="may not know the client's key"):
            Client(address(door), curve_dir=keys / "stranger", connect_timeout=1.0)
        assert ring.hellos == []
        with Client(address(door), curve_dir=keys / "client", connect_timeout=WAIT_S) as client:
            assert client.generate("a", timeout=WAIT_S).text == "a.0"


def test_a_server_with_another_key_is_not_talked_to(tmp_path: Path, keys: Path, door: TcpDoor) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    create_certificates(mine, "server")
    (mine / "client.key_secret").write_bytes((keys / "client/client.key_secret").read_bytes())
    (mine / "client.key_secret").chmod(0o600)
    with ring_at(tmp_path, door) as ring:
        with pytest.raises(RingClosed, match="has not answered"):
            Client(address(door), curve_dir=mine, connect_timeout=0.2)
        assert ring.hellos == []


def test_no_server_is_an_error_after_the_timeout(keys: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RingClosed, match=r"tcp://127.0.0.1:\d+ has not answered within 0.1 s"):
        Client(address(TcpDoor(2, keys / "server")), curve_dir=keys / "client", connect_timeout=0.1)
    assert time.monotonic() - began < 2.0 * SLACK


@pytest.mark.parametrize(("state", "says"), [("failed", "has failed"), ("absent", "has been stopped")])
def test_a_ring_that_says_that_it_ends_is_gone_at_once(
    tmp_path: Path, keys: Path, state: str, says: str
) -> None:
    door = TcpDoor(2, keys / "server")
    with (
        fake_ring(tmp_path, lambda _: [], door=door) as ring,
        Client(address(door), curve_dir=keys / "client", connect_timeout=WAIT_S) as client,
    ):
        stream = client.stream("x", timeout=WAIT_S)
        for each in ("ready", "draining", state):
            ring.send_message(RingStatus(each, 1, 0, 5))
        with pytest.raises(RingClosed, match=says):
            next(stream)


def test_a_server_that_goes_without_a_word_is_gone_at_once(tmp_path: Path, keys: Path) -> None:
    door = TcpDoor(2, keys / "server")
    with fake_ring(tmp_path, lambda _: [], door=door):
        client = Client(address(door), curve_dir=keys / "client", connect_timeout=WAIT_S)
        stream = client.stream("x", timeout=WAIT_S)
    with client, pytest.raises(RingClosed, match=r"connection to .* was lost"):
        next(stream)


def test_the_last_words_of_a_server_that_goes_are_heard(tmp_path: Path, keys: Path) -> None:
    door = TcpDoor(2, keys / "server")
    with fake_ring(tmp_path, lambda _: [], door=door) as ring:
        client = Client(address(door), curve_dir=keys / "client", connect_timeout=WAIT_S)
        stream = client.stream("x", timeout=WAIT_S)
        request = ring.wait_request()
        ring.send(output(request, "a"))
        ring.send_message(RingStatus("failed", 0, 0, 0))
        client.server_info()
    with client:
        assert next(stream).text == "a"
        with pytest.raises(RingClosed, match="has failed"):
            next(stream)


@pytest.mark.parametrize(
    "where",
    ["tcp://", "tcp://host", "tcp://:5", "tcp://127.0.0.1:0", "tcp://127.0.0.1:x", "tcp://127.0.0.1:99999"],
)
def test_what_is_no_address_is_refused_by_name(where: str) -> None:
    with pytest.raises(ConfigError, match=r"run_dir: .*tcp://HOST:PORT"):
        Client(where)


@pytest.mark.parametrize("missing", ["client.key_secret", "server.key"])
def test_a_missing_or_unreadable_key_is_named(keys: Path, tmp_path: Path, missing: str) -> None:
    for name in ("client.key_secret", "server.key"):
        (tmp_path / name).write_bytes((keys / "client" / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    broken = tmp_path / missing
    for content in (
        None,
        b"",
        b'public-key = "short"\nsecret-key = "short"',
        b'public-key = "' + b"\xff" * 40,
    ):
        if content is None:
            broken.unlink()
        else:
            broken.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"curve_dir: .*{missing}"):
            Client("tcp://127.0.0.1:5555", curve_dir=tmp_path)


def test_a_public_key_alone_is_no_clients_key(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "client.key_secret").write_bytes((keys / "client/client.key").read_bytes())
    (tmp_path / "server.key").write_bytes((keys / "server/server.key").read_bytes())
    with pytest.raises(ConfigError, match=r"client\.key_secret has no secret key"):
        Client("tcp://127.0.0.1:5555", curve_dir=tmp_path)


def test_keys_for_a_run_directory_are_refused(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="curve_dir: keys are for an address"):
        Client(tmp_path, curve_dir=keys / "client")
