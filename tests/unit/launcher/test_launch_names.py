"""The address that a launch listens on: what is wrong with it is said by the setting that names it."""

from __future__ import annotations

import errno
import os
import re
import socket
from typing import Any

import pytest

from runtime.base.errors import AddressInUse, ConfigError
from runtime.launcher.launch_names import _listen
from runtime.settings.config import RuntimeConfig
from tests.harness.cases import for_each


@for_each("host", ["192.0.2.1", "no-such-host.invalid", "a..b", "bücher..example", "[::1]"])
def test_an_address_of_elsewhere_is_the_hosts_fault(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^host: {re.escape(host)} is no address of this machine: ."):
        _listen(host, 0)


def test_a_name_that_has_ipv6_addresses_alone_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian has ip6-localhost. A name that has both is listened on by the address it always was."""

    def addresses(*families: socket.AddressFamily) -> Any:
        known = {socket.AF_INET: ("127.0.0.1", 0), socket.AF_INET6: ("::1", 0, 0, 0)}
        return lambda *_, **__: [
            (each, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", known[each]) for each in families
        ]

    for families, expected in (
        ((socket.AF_INET6,), "::1"),
        ((socket.AF_INET6, socket.AF_INET), "127.0.0.1"),
    ):
        monkeypatch.setattr(socket, "getaddrinfo", addresses(*families))
        with _listen("some-name", 0) as listener:
            assert listener.getsockname()[0] == expected


def test_a_machine_without_ipv6_is_the_hosts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel has no such sockets, where ipv6.disable=1 was given to it."""

    def none_of_those(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", none_of_those)
    with pytest.raises(ConfigError, match=r"^host: ::1 is no address of this machine: Address family not"):
        _listen("::1", 0)


def test_an_ipv6_address_stands_in_brackets_in_a_url() -> None:
    assert RuntimeConfig(host="::1").http_url(80) == "http://[::1]:80"
    assert RuntimeConfig().http_url(80) == "http://127.0.0.1:80"


def test_a_taken_port_is_the_ports_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"^port: .*127.0.0.1:{port}.*in use"):
            _listen("127.0.0.1", port)
