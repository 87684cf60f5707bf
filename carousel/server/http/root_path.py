"""Root path: the beginning of the paths by which a proxy serves this server, taken off or not."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Takes the root path off. What stands behind it, the question for a key above all, sees the server's own
    paths alone. A path without it is left as it is.
    """

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        """`root_path`: like /llm or /a/b."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"][len(self._root_path) :]}
        await self._app(scope, receive, send)
