"""WebOriginMiddleware: refuses requests that a web page of another site makes its reader's browser send.

A browser sends two headers that pages cannot choose: `Host`, the name in the address, and `Origin`, the site
of the page. If an attacker lets the page's own name resolve to this server's address (DNS rebinding), the
browser regards the page as of the same origin, and only `Host` reveals it.

`Origin` comes with whatever could change something, but not where a page shows an image or loads a script.
There `Sec-Fetch-Site` says that the page is of another site, and `Sec-Fetch-Dest` whether a reader sees the
answer.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from carousel.server.http.errors import error_response
from runtime.base.errors import RequestError

LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Endings of names that nobody can register in the public DNS."""
OWN_SITES = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site for the server's own pages, and for what a reader has opened."""
SHOWN_CHARS = 100

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.%]+\]|[a-z0-9._-]+)(?::[0-9]*)?", re.IGNORECASE)


class WebOriginMiddleware:
    def __init__(
        self, app: ASGIApp, *, own_hosts: Iterable[str], allowed_hosts: Sequence[str], origins: Sequence[str]
    ) -> None:
        """`own_hosts` are names of this machine. `allowed_hosts` and `origins` are those of the settings: `*`
        stands for all, and a host like `*.example.com` for all names below it.
        """
        self._app = app
        self._any_host, self._any_origin = "*" in allowed_hosts, "*" in origins
        self._hosts = frozenset(_plain(name) for name in (*own_hosts, *allowed_hosts))
        self._suffixes = (*LOCAL_SUFFIXES, *(_plain(name[1:]) for name in allowed_hosts if name[:2] == "*."))
        self._origins = frozenset(origins)
        self._known_host: bytes | None = None
        """The last checked name that is a name of this server: callers mostly use one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        names: list[bytes] = []
        pages: list[bytes] = []
        site = shown_as = b""
        for name, value in scope["headers"]:
            if name == b"host":
                names.append(value)
            elif name == b"origin":
                pages.append(value)
            elif name == b"sec-fetch-site":
                site = value
            elif name == b"sec-fetch-dest":
                shown_as = value
        if not pages and not site and names == [self._known_host]:
            return None
        hosts = [name.decode("latin-1") for name in names]
        for host in hosts:
            if not self._any_host and not self._knows(host):
                return RequestError(
                    f"Host: {host[:SHOWN_CHARS]!r} is no name of this server; start it with --allowed-hosts "
                    "to serve it under that name, or with --api-key",
                    param="Host",
                    code="host_not_allowed",
                    status=403,
                )
        own = {f"{scheme}://{host}" for host in hosts for scheme in ("http", "https")}
        for page in pages:
            origin = page.decode("latin-1")
            if not (self._any_origin or origin in self._origins or origin in own):
                return RequestError(
                    f"Origin: pages of {origin[:SHOWN_CHARS]!r} may not call this server; --cors-origins "
                    "names those that may",
                    param="Origin",
                    code="origin_not_allowed",
                    status=403,
                )
        is_visit = scope["method"] == "GET" and shown_as == b"document"
        if not (pages or site in (b"", *OWN_SITES) or is_visit or self._any_origin):
            return RequestError(
                "Sec-Fetch-Site: pages of other sites may not have a browser call this server; those that "
                "--cors-origins names may, with fetch",
                param="Sec-Fetch-Site",
                code="origin_not_allowed",
                status=403,
            )
        if len(names) == 1:
            self._known_host = names[0]
        return None

    def _knows(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = _plain(match["name"])
        return "." not in name or _is_address(name) or name in self._hosts or name.endswith(self._suffixes)


def machine_names(listening_at: str) -> tuple[str, str]:
    """Return the names under which this machine knows itself. `listening_at` is the host setting."""
    return socket.gethostname(), listening_at


def _plain(name: str) -> str:
    """Return the name in lower case, without a dot at its end."""
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
