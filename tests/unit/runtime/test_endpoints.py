"""Names and ports: which process is reached where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runtime.base.errors import ConfigError
from runtime.ring.endpoints import Endpoints, TcpEndpoints
from tests.harness.cases import for_each


def test_every_process_has_a_socket_of_its_own() -> None:
    endpoints = Endpoints(Path("/run/x"))
    names = [endpoints.scheduler_in, endpoints.launcher_in, endpoints.step_results]
    for index in range(64):
        names += [endpoints.tokenizer_in(index), endpoints.detokenizer_in(index)]
        names += [endpoints.client_out(index), endpoints.rank_in(index)]
    assert len(set(names)) == len(names)
    assert all(name.startswith("ipc:///run/x/") for name in names)


def test_no_socket_name_is_too_long_where_the_directory_is_not() -> None:
    endpoints = Endpoints(Path("/" + "d" * 89))
    for name in (endpoints.detokenizer_in(63), endpoints.tokenizer_in(63), endpoints.step_results):
        assert len(name.removeprefix("ipc://")) < 108
    with pytest.raises(ConfigError, match="run_dir"):
        Endpoints(Path("/" + "d" * 90))


def test_the_first_port_is_the_first_detokenizers_and_the_tokenizers_come_last() -> None:
    tcp = TcpEndpoints.parse("tcp://127.0.0.1:5000", num_tokenizers=3, num_detokenizers=2)
    assert [tcp.client_out(0), tcp.client_out(1)] == ["tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001"]
    assert [tcp.tokenizer_in(index) for index in range(3)] == [
        "tcp://127.0.0.1:5002",
        "tcp://127.0.0.1:5003",
        "tcp://127.0.0.1:5004",
    ]


@for_each(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("[::1]", True),
        ("*", False),
        ("0.0.0.0", False),
        ("[::]", False),
        ("192.168.0.1", False),
    ],
)
def test_only_addresses_that_no_other_machine_reaches_are_loopback(host: str, is_loopback: bool) -> None:
    assert TcpEndpoints.parse(f"tcp://{host}:5000", 1, 1).is_loopback is is_loopback


@for_each(
    "address",
    [
        "127.0.0.1:5000",
        "ipc:///tmp/x",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://:5000",
        "tcp://127.0.0.1:port",
        "tcp://127.0.0.1:\u0665\u0660\u0660\u0660",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65535",
        "tcp://127.0.0.1:-1",
        "tcp://eth0:5000",
        "tcp://::1:5000",
        "tcp://example.org:5000",
        "tcp://127.0.0.1:5000/x",
    ],
)
def test_an_address_that_cannot_be_bound_as_it_stands_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape(address)):
        TcpEndpoints.parse(address, 1, 1)
