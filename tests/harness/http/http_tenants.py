"""Tenants of an HTTP server under test, and each one's HTTP client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import Answer, say_nothing

ROLES = {"alice": "user", "bob": "user", "mona": "metrics", "root": "admin"}


def key_of(name: str) -> str:
    return f"key-of-{name}"


def keys_file(folder: Path, roles: dict[str, str] = ROLES, extra: str = "") -> Path:
    """Write a file of API keys. `extra`: lines for each of the tenants."""
    path = folder / "keys.toml"
    sections = [f'[{name}]\nkey = "{key_of(name)}"\nrole = "{role}"\n{extra}' for name, role in roles.items()]
    path.write_text("\n".join(sections))
    path.chmod(0o600)
    return path


def authorization(name: str) -> str:
    """The header, as a whole line."""
    return f"Authorization: Bearer {key_of(name)}\r\n"


def caller(front: Front, name: str) -> httpx.Client:
    """An HTTP client with the tenant's key."""
    client = front.open_client()
    client.headers["Authorization"] = f"Bearer {key_of(name)}"
    return client


@contextmanager
def tenants_front(
    folder: Path, answer: Answer = say_nothing, *, names: Iterable[str] = ROLES, **settings: Any
) -> Iterator[tuple[Front, dict[str, httpx.Client]]]:
    """An HTTP server with these tenants, and each one's client."""
    path = keys_file(folder, {name: ROLES[name] for name in names})
    (folder / "run").mkdir()
    with http_front(folder / "run", answer, api_keys=str(path), **settings) as front:
        callers = {name: caller(front, name) for name in names}
        try:
            yield front, callers
        finally:
            for client in callers.values():
                client.close()
