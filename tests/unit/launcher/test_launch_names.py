"""The address that a launch listens on: what is wrong with it is said by the setting that names it."""

from __future__ import annotations

import socket

import pytest

from runtime.base.errors import AddressInUse, ConfigError
from runtime.launcher.launch_names import _listen
from runtime.settings.config import RuntimeConfig


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_elsewhere_is_the_hosts_fault(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^host: {host} is no address of this machine"):
        _listen(host, 0)


def test_an_ipv6_address_stands_in_brackets_in_a_url() -> None:
    assert RuntimeConfig(host="::1").http_url(80) == "http://[::1]:80"
    assert RuntimeConfig().http_url(80) == "http://127.0.0.1:80"


def test_a_taken_port_is_the_ports_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"^port: .*127.0.0.1:{port}.*in use"):
            _listen("127.0.0.1", port)
