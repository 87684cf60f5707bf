"""Root path: the prefix of the paths under which a proxy serves this server. The proxy may remove it
or not.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Removes the root path. So everything behind this middleware, above all the check of keys, sees the
    server's own paths only. A path without the prefix is left unchanged.
    """

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        """`root_path` is of the form /llm or /a/b."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"][len(self._root_path) :]}
        await self._app(scope, receive, send)
