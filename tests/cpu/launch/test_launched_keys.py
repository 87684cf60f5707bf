"""A launch with a file of API keys: what each opens, and keys that come and go while it serves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.http.http_tenants import ROLES, key_of, keys_file
from tests.harness.ring.launched import ROOT, SLACK, Launched, launched, wait_until

WAIT_S = 20.0 * SLACK
PROMPT = (ROOT / "README.md").read_text()[:1500]


class Served:
    """A launch, the folder of its keys, and each tenant's HTTP client."""

    def __init__(self, launch: Launched, folder: Path, stack: ExitStack) -> None:
        self.launch = launch
        self.folder = folder
        self._stack = stack
        self._callers: dict[str, httpx.Client] = {}

    def caller(self, name: str) -> httpx.Client:
        if name not in self._callers:
            headers = {"Authorization": f"Bearer {key_of(name)}"}
            client = httpx.Client(base_url=self.launch.url, headers=headers, timeout=WAIT_S)
            self._callers[name] = self._stack.enter_context(client)
        return self._callers[name]

    def ask(self, name: str, **body: Any) -> httpx.Response:
        return self.caller(name).post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **body})

    def hang_up(self, roles: dict[str, str]) -> None:
        """Replace the keys and have the launch read them."""
        keys_file(self.folder, roles)
        os.kill(self.launch.process.pid, signal.SIGHUP)

    def wait_for(self, name: str, status: int) -> None:
        """Wait until the server answers a tenant so."""
        wait_until(
            lambda: self.caller(name).get("/v1/models").status_code == status, 10.0, f"{name}: {status}"
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    keys = keys_file(folder)
    settings = ("--api-keys", str(keys), "--cpu-threads", "1", "--context-length", "2048")
    # What a process has been given at its start is looked at, too.
    with launched(*settings, is_cold=True) as launch, ExitStack() as stack:
        yield Served(launch, folder, stack)


@pytest.fixture(autouse=True)
def first_keys(served: Served) -> None:
    """Each test begins with the same ones."""
    served.hang_up(ROLES)
    for name in ROLES:
        served.wait_for(name, 403 if name == "mona" else 200)


def test_each_key_opens_what_its_role_may_do(served: Served) -> None:
    assert served.ask("nobody").status_code == 401
    assert served.ask("alice").status_code == 200
    assert served.ask("mona").status_code == 403
    for name, status in (("alice", 403), ("mona", 200), ("root", 200)):
        assert served.caller(name).get("/metrics").status_code == status
    for name, status in (("alice", 403), ("mona", 403), ("root", 200)):
        for path in ("/flush_cache", "/stop_profile"):
            found = served.caller(name).post(path).status_code
            assert found == (409 if path == "/stop_profile" and status == 200 else status)


def test_nobody_sees_by_cached_tokens_what_others_have_asked(served: Served) -> None:
    def cached(name: str, **body: Any) -> int:
        usage = served.ask(name, **body).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    served.caller("root").post("/flush_cache")
    assert cached("alice") == 0
    hit = cached("alice")
    assert hit > 100
    assert cached("bob") == 0
    assert cached("bob") == hit
    # A salt parts what a tenant has of its own, and is no way to what others have.
    assert cached("bob", cache_salt="alice") == 0
    assert cached("alice", cache_salt="alice") == 0
    assert cached("root") == 0


def test_a_key_that_is_taken_away_ends_nothing_that_runs(served: Served) -> None:
    body = {"prompt": "def f():\n", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with served.caller("alice").stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        served.hang_up({"carol": "user", "bob": "metrics"})
        served.wait_for("carol", 200)
        assert served.ask("alice").status_code == 401
        served.wait_for("bob", 403)
        *_, last = [line for line in lines if line]
    assert last == "data: [DONE]"
    assert served.ask("carol").status_code == 200


def test_a_mistake_leaves_the_keys_as_they_were(served: Served) -> None:
    served.hang_up({"carol": "emperor"})
    wait_until(lambda: "Invalid enum value 'emperor'" in served.launch.log(), 10.0, "the mistake is logged")
    assert served.ask("alice").status_code == 200
    assert served.ask("carol").status_code == 401
    assert served.launch.process.poll() is None


def test_a_server_that_is_started_again_knows_the_newest_keys(served: Served) -> None:
    served.hang_up({"carol": "user"})
    served.wait_for("carol", 200)
    pid = served.launch.pid_of("api")
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return served.launch.pid_of("api") != pid and served.ask("carol").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(is_back, 20.0, "another HTTP server serves")
    assert served.ask("alice").status_code == 401


def test_no_key_is_written_anywhere(served: Served) -> None:
    texts = {"log": served.launch.log().encode()}
    for path in served.launch.run_dir.iterdir():
        if path.is_file():
            texts[path.name] = path.read_bytes()
    for pid in served.launch.pids():
        texts[f"process {pid}"] = b"".join(
            Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")
        )
    assert "tenants.json" in texts
    for name, text in texts.items():
        for tenant in (*ROLES, "carol"):
            assert key_of(tenant).encode() not in text, name
    assert key_of("alice") not in served.caller("root").get("/server_info").text
