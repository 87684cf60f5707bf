"""Assignment of messages received over TCP to the tenant of the key that was used."""

from __future__ import annotations

import msgspec

from runtime.base.client_id import is_client_of
from runtime.wire.handle import client_of
from runtime.wire.messages import AbortRequest, ControlRequest, GenerateRequest, ToTokenizer


def stamped(message: ToTokenizer, tenant: str, secret: bytes) -> ToTokenizer:
    """Return the message as one of `tenant`, whatever tenant it names. secret: key of the launch. Raises
    ValueError if it names a client of another tenant.
    """
    clients = _clients_in(message)
    if not all(is_client_of(client, tenant, secret) for client in clients):
        raise ValueError(f"a message of {tenant or 'the owner'} names the client of another tenant")
    return msgspec.structs.replace(message, tenant=tenant)


def _clients_in(message: ToTokenizer) -> set[int]:
    if isinstance(message, GenerateRequest):
        return {client_of(message.handle)}
    if isinstance(message, AbortRequest):
        clients = {client_of(handle) for handle in message.handles}
        return clients | {message.client} if message.client else clients
    assert isinstance(message, ControlRequest)
    return {message.client, *message.own}
