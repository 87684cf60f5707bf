"""The stamp on what comes over TCP: whose it is, and that it names nobody else's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime.base.client_id import draw_client_id
from runtime.ring.tenants import OWNER
from runtime.wire.handle import make_handle
from runtime.wire.messages import AbortRequest, ControlRequest, GenerateRequest
from runtime.wire.sampling_params import SamplingParams
from tokenizer_proc.stamp import stamped

SECRET = b"s" * 32


def ask(tenant: str, client: int) -> GenerateRequest:
    return GenerateRequest(make_handle(client, 0), SamplingParams(seed=1), text="x", tenant=tenant)


def test_a_message_over_tcp_is_its_keys_whatever_it_says() -> None:
    own = draw_client_id("alice", SECRET)
    messages: list[Any] = [
        ask("bob", own),
        AbortRequest((make_handle(own, 3),), tenant="bob"),
        AbortRequest(client=own, tenant=OWNER),
        ControlRequest(own, 1, "request_stats", own=(own,), tenant=OWNER),
    ]
    for message in messages:
        assert stamped(message, "alice", SECRET) == msgspec.structs.replace(message, tenant="alice")


@pytest.mark.parametrize("whose", ["bob", OWNER])
def test_a_message_over_tcp_names_no_client_of_another_tenant(whose: str) -> None:
    own, other = draw_client_id("alice", SECRET), draw_client_id(whose, SECRET)
    messages: list[Any] = [
        ask("alice", other),
        AbortRequest((make_handle(own, 3), make_handle(other, 3))),
        AbortRequest(client=other),
        ControlRequest(other, 1, "server_info"),
        ControlRequest(own, 1, "request_stats", own=(own, other)),
    ]
    for message in messages:
        with pytest.raises(ValueError, match="another tenant"):
            stamped(message, "alice", SECRET)
