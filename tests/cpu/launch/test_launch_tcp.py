"""A launch served over TCP: with keys, without, and to those who should not be there."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from zmq.auth import load_certificate

from carousel import Client, RingClosed, SamplingParams
from runtime.base.errors import Forbidden
from runtime.ring.endpoints import Endpoints
from runtime.ring.keys import make_keys
from runtime.ring.tenants import Tenants, TenantsFile
from runtime.wire.format import PROTOCOL_VERSION
from runtime.wire.handle import make_handle, with_attempt
from runtime.wire.messages import UNIONS, AbortRequest, GenerateRequest, Hello
from runtime.wire.transport import SCHEMA, MessageCodec
from tests.harness.ring.launched import SLACK, Launched, free_ports, launched, leftovers, wait_until

SHORT = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
NUM_PORTS = 4
WORKERS = ("--no-http", "--tokenizer-workers", "2", "--detokenizer-workers", "2")
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    launch: Launched
    port: int
    keys: Path

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def client(self, curve_dir: Path | None = None) -> Client:
        return Client(self.address, curve_dir=curve_dir or self.keys / "client")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = tmp_path_factory.mktemp("keys")
    make_keys(keys, ["client", "other", "operator"])
    table = keys / "api_keys.toml"
    table.write_text('[operator]\nrole = "admin"\n')
    table.chmod(0o600)
    return keys


def start(keys: Path) -> tuple[int, tuple[str, ...]]:
    port = free_ports(NUM_PORTS)
    table = ("--api-keys", str(keys / "api_keys.toml"))
    return port, (*WORKERS, "--zmq-bind", f"tcp://127.0.0.1:{port}", "--curve-dir", str(keys), *table)


@pytest.fixture(scope="module")
def served(keys: Path) -> Iterator[Served]:
    port, arguments = start(keys)
    with launched(*arguments) as launch:
        yield Served(launch, port, keys)


def test_clients_with_keys_and_those_of_the_run_directory_get_the_same(served: Served) -> None:
    texts: set[str] = set()
    for client in (served.client(), served.client(served.keys / "other"), Client(served.launch.run_dir)):
        with client:
            texts.add(client.generate("def f(", SHORT, timeout=60).text)
    assert len(texts) == 1


def test_every_lane_works_over_tcp_too(served: Served) -> None:
    with served.client() as client:
        outputs = client.generate(["x"] * 12, SHORT, timeout=60)
    assert len({output.text for output in outputs}) == 1


def test_a_wrong_key_gets_nothing_and_disturbs_nobody(served: Served, tmp_path: Path) -> None:
    make_keys(tmp_path / "elsewhere")
    wrong = tmp_path / "mixed"
    wrong.mkdir()
    (wrong / "client.key_secret").symlink_to(tmp_path / "elsewhere" / "client" / "client.key_secret")
    (wrong / "server.key").symlink_to(served.keys / "client" / "server.key")
    refused: list[Exception] = []

    def try_to_connect() -> None:
        try:
            Client(served.address, curve_dir=wrong, connect_timeout=1.0).close()
        except RingClosed as error:
            refused.append(error)

    strangers = [threading.Thread(target=try_to_connect) for _ in range(4)]
    for stranger in strangers:
        stranger.start()
    with served.client() as client:
        while any(stranger.is_alive() for stranger in strangers):
            assert len(client.generate("x", SHORT, timeout=TIMEOUT_S).token_ids) == 4
    for stranger in strangers:
        stranger.join()
    assert len(refused) == 4


@pytest.mark.parametrize("num_strangers", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_strangers_on_each_port_hold_up_no_client(served: Served, num_strangers: int) -> None:
    """Some say nothing, some begin a handshake, some send what is no handshake at all."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    openings = [b"", b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300)]
    with served.client() as client, ExitStack() as strangers:
        for number in range(num_strangers):
            for offset in range(NUM_PORTS):
                address = ("127.0.0.1", served.port + offset)
                stranger = strangers.enter_context(socket.create_connection(address, timeout=10))
                stranger.sendall(openings[number % len(openings)])
            if number % 50 == 0:
                assert len(client.generate("x", SHORT, timeout=TIMEOUT_S).token_ids) == 4
        with served.client() as late:
            assert len(late.generate("x", SHORT, timeout=TIMEOUT_S).token_ids) == 4
    assert served.launch.process.poll() is None


@contextmanager
def raw_peer(served: Served, kind: int, offset: int, name: str = "other") -> Iterator[zmq.Socket[bytes]]:
    """A bare socket that has the key of `name`, connected to one of the ports."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(kind) as peer:
        peer.setsockopt(zmq.SNDTIMEO, int(1000 * TIMEOUT_S))
        peer.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
        peer.curve_publickey, peer.curve_secretkey = load_certificate(
            served.keys / name / "client.key_secret"
        )
        peer.curve_serverkey, _ = load_certificate(served.keys / "server.key")
        peer.connect(f"tcp://127.0.0.1:{served.port + offset}")
        yield peer
    context.destroy(linger=0)


@pytest.mark.parametrize(("offset", "kind"), [(0, zmq.DEALER), (1, zmq.DEALER), (2, zmq.PUSH), (3, zmq.PUSH)])
def test_frames_that_mean_nothing_hold_up_no_other_client(served: Served, offset: int, kind: int) -> None:
    with raw_peer(served, kind, offset) as peer, served.client() as client:
        for frames in ([b""], [b"garbage"], [b"CRSL" + b"\xff" * 100], [b"a", b"b"], [b"x"] * 50):
            for _ in range(20):
                peer.send_multipart(frames)
        for _ in range(4):  # over every lane
            assert len(client.generate("x", SHORT, timeout=TIMEOUT_S).token_ids) == 4


@pytest.mark.parametrize("name", ["other", "operator"])
def test_who_asks_for_it_is_told_how_the_ring_is_and_only_an_operator_of_its_load(
    served: Served, name: str
) -> None:
    codec = MessageCodec(UNIONS["client_out"], 0)
    with raw_peer(served, zmq.DEALER, 1, name) as peer:
        peer.send(codec.encode(Hello(PROTOCOL_VERSION, SCHEMA.hex(), wants_status=True)))
        ack, status = (codec.decode(peer.recv(), any_epoch=True) for _ in range(2))
    assert (ack.num_tokenizers, ack.num_detokenizers, ack.client % 2) == (2, 2, 1)
    assert status.state == "ready"
    assert (status.num_free_pages > 0) == (name == "operator")


def test_only_an_admin_asks_the_ring_itself(served: Served) -> None:
    for client in (served.client(), served.client(served.keys / "other")):
        with client:
            for ask in (client.server_info, client.flush_cache, client.pause_generation):
                with pytest.raises(Forbidden):
                    ask(timeout=TIMEOUT_S)
            assert len(client.generate("x", SHORT, timeout=TIMEOUT_S).token_ids) == 4
    with served.client(served.keys / "operator") as operator:
        assert operator.server_info(timeout=TIMEOUT_S)["num_pages"] > 0
        operator.flush_cache(timeout=TIMEOUT_S)
    with Client(served.launch.run_dir) as client:
        assert client.server_info(timeout=TIMEOUT_S)["num_pages"] > 0


def test_who_knows_another_tenants_client_can_neither_end_nor_claim_nor_ask_for_it(served: Served) -> None:
    to_tokenizer, to_detokenizer = (MessageCodec(UNIONS[name], 0) for name in ("tokenizer_in", "client_in"))
    with ExitStack() as attackers, served.client() as victim:
        stream = iter(victim.stream("x", LONG, timeout=TIMEOUT_S))
        next(stream)
        for number, client in enumerate(victim._session.connection.client_ids):
            handles = tuple(make_handle(client, seq) for seq in range(8))
            sampling = SamplingParams(seed=1, max_tokens=4)
            for offset in (2, 3):
                attacker = attackers.enter_context(raw_peer(served, zmq.PUSH, offset))
                for tenant in ("", "client", "other"):
                    attacker.send(to_tokenizer.encode(AbortRequest(client=client, tenant=tenant)))
                    attacker.send(to_tokenizer.encode(AbortRequest(handles, tenant=tenant)))
                for handle in handles:
                    again = GenerateRequest(with_attempt(handle, 9), sampling, text="mine")
                    attacker.send(to_tokenizer.encode(again))
            attacker = attackers.enter_context(raw_peer(served, zmq.DEALER, number))
            attacker.send(to_detokenizer.encode(Hello(PROTOCOL_VERSION, SCHEMA.hex(), client=client)))
            assert not attacker.poll(500), "it was let in under an id that is not its own"
        peer = attackers.enter_context(raw_peer(served, zmq.PUSH, 3))

        def is_noticed() -> bool:  # what is dropped is said once a second
            peer.send(to_tokenizer.encode(AbortRequest(client=client)))
            return "names the client of another tenant" in served.launch.log()

        wait_until(is_noticed, 5.0 * SLACK, "its messages are read")
        assert list(stream)[-1].finish_reason == "length"


def test_a_key_that_is_new_is_let_in_once_the_tenants_are_read_again(served: Served) -> None:
    make_keys(served.keys, ["late"])
    with pytest.raises(RingClosed):
        Client(served.address, curve_dir=served.keys / "late", connect_timeout=0.5)
    tenants = TenantsFile(Endpoints(served.launch.run_dir).tenants_file)
    tenants.write(tenants.read_if_changed() or Tenants())

    # Each process reads them in its own time: the client may be let in by one and refused by the next.
    with Client(served.address, curve_dir=served.keys / "late", connect_timeout=TIMEOUT_S) as client:
        for _ in range(4):  # over every lane and tokenizer
            assert len(client.generate("x", SHORT, timeout=TIMEOUT_S).token_ids) == 4


@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_a_client_learns_at_once_that_the_ring_has_ended(keys: Path, how: str) -> None:
    port, arguments = start(keys)
    arguments = (*arguments, "--restart=never", "--drain-timeout=0", "--skip-tokenizer-init")
    light = launched(*arguments, module="tests.harness.ring.sleeping_worker")
    with light as launch, Served(launch, port, keys).client() as client:
        stream = client.stream([5], LONG)
        next(iter(stream))
        began = time.monotonic()
        if how == "stopped":
            assert launch.stop() == 0
        else:
            os.kill(launch.pid_of("worker"), signal.SIGKILL)
            assert launch.wait_exit(5.0) == 70
        with pytest.raises(Exception, match=r"gone|shutting down|failed|worker"):
            for _ in stream:
                pass
        with pytest.raises(RingClosed, match=r"has been stopped|has failed"):
            client.generate([5], SHORT, timeout=TIMEOUT_S)
        assert time.monotonic() - began <= 4.0 * SLACK
        assert not leftovers(launch.run_dir)


def test_a_taken_port_ends_the_launch_with_its_name() -> None:
    port = free_ports(NUM_PORTS)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 3))
        taken.listen()
        address = f"tcp://127.0.0.1:{port}"
        light = (*WORKERS, "--skip-tokenizer-init")
        launch = Launched(*light, "--zmq-bind", address, module="tests.harness.ring.sleeping_worker")
        try:
            assert launch.wait_exit(30.0) == 69
            last = launch.log().strip().splitlines()[-1]
            assert "zmq_bind" in last
            assert str(port + 3) in last
            assert not leftovers(launch.run_dir)
        finally:
            launch.close()
