"""PageMiddleware: serves the web page at the server's address, and its files.

It runs before the check of keys: the files are the same for all callers and reveal nothing of the server. The
page requests its data like any other caller, with its user's key.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

FOLDER = Path(__file__).parent / "static"
PREFIX = "/page/"
INDEX = "index.html"
MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain",
}
NEEDS_KEY = b'<meta name="needs-key" content="no">'
_IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


class PageFile:
    def __init__(self, content: bytes, media_type: str) -> None:
        self.content = content
        self.packed = gzip.compress(content, mtime=0)
        self.media_type = media_type
        self.etag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'

    def answer(self, headers: Headers, policy: str) -> Response:
        """Return the answer to a request with these headers."""
        fields = {
            "Cache-Control": "no-cache",  # browsers ask again each time and get a 304
            "Content-Security-Policy": policy,
            "ETag": self.etag,
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept, Accept-Encoding",
            "X-Content-Type-Options": "nosniff",
        }
        if self.etag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=fields)
        if "gzip" in headers.get("accept-encoding", ""):
            fields["Content-Encoding"] = "gzip"
            return Response(self.packed, headers=fields, media_type=self.media_type)
        return Response(self.content, headers=fields, media_type=self.media_type)


@cache
def page_files() -> dict[str, PageFile]:
    """Return the page's files by their names after PREFIX. They are read and packed once in a process."""
    paths = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in MEDIA_TYPES]
    return {
        path.relative_to(FOLDER).as_posix(): PageFile(path.read_bytes(), MEDIA_TYPES[path.suffix])
        for path in paths
    }


def security_policy(index: bytes) -> str:
    """Return the Content-Security-Policy of the page. It allows only files of its own server, no script in
    markup except the import map, and no markup that has not been through the sanitizer.
    """
    hashes = [hashlib.sha256(text).digest() for text in _IMPORT_MAP.findall(index)]
    scripts = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    )


class PageMiddleware:
    """Answers `/` for browsers, and files under PREFIX. Other requests are passed on."""

    def __init__(self, app: ASGIApp, *, files: Mapping[str, PageFile], needs_key: bool) -> None:
        self._app = app
        index = files[INDEX].content
        self._policy = security_policy(index)
        if needs_key:
            index = index.replace(NEEDS_KEY, NEEDS_KEY.replace(b'"no"', b'"yes"'))
        self._index = PageFile(index, MEDIA_TYPES[".html"])
        self._files = {f"{PREFIX}{name}": file for name, file in files.items() if name != INDEX}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = None
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            path: str = scope["path"]
            if path.startswith(PREFIX):
                file = self._files.get(path)
            elif path == "/" and "text/html" in Headers(scope=scope).get("accept", ""):
                file = self._index
        if file is None:
            await self._app(scope, receive, send)
        else:
            answer = file.answer(Headers(scope=scope), self._policy)
            await answer(scope, receive, send)
