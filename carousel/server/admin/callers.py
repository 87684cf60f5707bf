"""Checks of callers who have the server read files of its machine, for servers without API keys."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request

from carousel.server.server_state import ServerState
from runtime.base.errors import Forbidden


def check_is_from_here(request: Request, what: str) -> None:
    """Raise Forbidden if the server has no API keys and the caller is on another machine. what: the change,
    as the beginning of the message: `adapters are loaded`.
    """
    server: ServerState = request.app.state.server
    if not server.config.has_api_keys and not _is_loopback(request):
        raise Forbidden(f"without API keys {what} from this machine alone")


def _is_loopback(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
