"""A launch whose processes are hurt: where they are, what the launch says of itself, whether all is free."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from carousel import Client, SamplingParams
from runtime.ring.endpoints import Endpoints
from runtime.ring.process import LaunchFile
from runtime.wire.status_page import StatusPage
from tests.harness.ring.launched import Launched, launched, wait_until

ROLES = ("tokenizer", "detokenizer", "scheduler", "worker", "api")
BEHIND = ("tokenizer", "detokenizer", "scheduler", "worker")
"""Every role but the HTTP server, which holds its callers' connections."""
ENGINE = ("scheduler", "worker")
SETTLE_S = 60.0
"""Far beyond what anything may take: the machine may be busy with other things."""


class FaultyLaunch:
    def __init__(self, launch: Launched) -> None:
        self.launch = launch
        self.http = httpx.Client(base_url=launch.url, timeout=30.0)
        endpoints = Endpoints(launch.run_dir)
        self.page = StatusPage(endpoints.status_file)
        self.config = LaunchFile.read(endpoints.config_file).config

    @property
    def epoch(self) -> int:
        """Epoch of the newest restart."""
        epoch: int = self.launch.state()["epoch"]
        return epoch

    def ready(self) -> tuple[int, str]:
        """(status, the role in the way) of /ready; (0, "") when nobody answers."""
        try:
            response = self.http.get("/ready")
        except httpx.TransportError:
            return 0, ""
        return response.status_code, response.json().get("role", "")

    def wait_ready(self) -> float:
        return wait_until(lambda: self.ready()[0] == 200, SETTLE_S, "the launch is ready again")

    def kill(self, role: str, number: int = signal.SIGKILL, index: int = 0) -> int:
        """Send a signal; returns the process."""
        pid = self.launch.pid_of(role, index)
        os.kill(pid, number)
        return pid

    def wait_replaced(self, role: str, pid: int, index: int = 0) -> float:
        """Seconds until another process is ready in the place of `pid`."""

        def is_replaced() -> bool:
            children = self.launch.state()["children"]
            there = [child for child in children if (child["role"], child["index"]) == (role, index)]
            return any(child["ready"] and child["pid"] not in (0, pid) for child in there)

        return wait_until(is_replaced, SETTLE_S, f"{role} is replaced")

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.launch.run_dir / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def serves(self) -> bool:
        with Client(self.launch.run_dir) as client:
            sampling = SamplingParams(max_tokens=4, ignore_eos=True)
            return len(client.generate("x", sampling, timeout=SETTLE_S).token_ids) == 4

    def check_accounts(self) -> None:
        """Nothing runs, waits or is held by anybody any more."""

        def is_free() -> bool:
            with Client(self.launch.run_dir) as client:
                info = client.server_info(timeout=SETTLE_S)
                pages = info["num_free_pages"] + info["num_cached_pages"]
                is_idle = info["num_running"] + info["num_waiting"] == 0 and pages == info["num_pages"]
            # Of a detokenizer these are its texts, of an API server its callers.
            return is_idle and not any(
                self.page.read(role, index).num_running
                for role, index in self.page.slots()
                if role in ("detokenizer", "api")
            )

        wait_until(is_free, SETTLE_S, "all pages, rows and texts are free")

    def close(self) -> None:
        self.http.close()
        self.page.close()


@contextmanager
def faulty_launch(*arguments: str) -> Iterator[FaultyLaunch]:
    """A small model in float32, whose output is the same whatever happens around it."""
    with launched(
        "--restart=auto",
        "--dtype=float32",
        "--restart-window=1",  # faults come so fast here that they would be too many for a launch
        "--max-total-tokens=65536",
        *arguments,
    ) as launch:
        faulty = FaultyLaunch(launch)
        try:
            yield faulty
        finally:
            faulty.close()


def still_same(faulty: FaultyLaunch, pids: list[int], seconds: float) -> bool:
    """Return True if no process is replaced for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if faulty.launch.pids() != pids:
            return False
        time.sleep(0.05)
    return True
