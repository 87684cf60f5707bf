"""What a user may name as a runtime."""

from __future__ import annotations

import pytest

from client.target import make_target
from runtime.errors import ConfigError


@pytest.mark.parametrize(
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


def test_an_address_is_read_whole() -> None:
    target = make_target("tcp://127.0.0.1:5555")
    assert target.client_out(0) == "tcp://127.0.0.1:5555"
