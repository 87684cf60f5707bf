"""A comparison's runs: one line of JSON each in a file, so that a comparison can be made in several sittings.
Also what one run is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cpu.workloads import WORKLOADS, Workload
from benchmarks.process_cpu import pss_bytes

WARM_UP = 0
"""The round before the first that counts: servers compile, and caches and allocators fill."""


class Server(NamedTuple):
    name: str
    backend: str
    url: str
    pid: int | None = None
    """Of its first process, whose whole tree's memory is then looked at."""

    @staticmethod
    def parse(text: str) -> Server:
        name, _, rest = text.partition("=")
        backend, _, address = rest.partition("@")
        url, _, pid = address.partition("#")
        if not (name and backend and url) or not (pid.isdigit() or "#" not in address):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=BACKEND@URL or NAME=BACKEND@URL#PID")
        return Server(name, backend, url, int(pid) if pid else None)


class Turn(NamedTuple):
    """One run that a comparison consists of."""

    round: int
    workload: str
    server: Server

    @property
    def key(self) -> tuple[int, str, str]:
        return self.round, self.workload, self.server.name


def all_turns(rounds: int, workloads: Sequence[str], servers: Sequence[Server]) -> Iterator[Turn]:
    """Servers take turns, so that what else the machine does meets all of them."""
    for number in range(WARM_UP, rounds + 1):
        for workload in workloads:
            for server in servers:
                yield Turn(number, workload, server)


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The file's lines; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_and_note(turn: Turn, model: Path, seed: int, path: Path) -> None:
    """Make one run and append it to the file. Raises RuntimeError when a request failed."""
    results = _measure(turn.server, WORKLOADS[turn.workload], model, seed + turn.round)
    line = {"round": turn.round, "workload": turn.workload, "server": turn.server.name, "figures": results}
    if turn.server.pid is not None:
        line["pss_mib"] = pss_bytes(turn.server.pid) / 2**20
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _measure(server: Server, workload: Workload, model: Path, seed: int) -> dict[str, float]:
    command = [
        *(sys.executable, "-m", "bench_serving", "--backend", server.backend, "--base-url", server.url),
        *("--tokenizer", str(model), "--seed", str(seed), "--disable-tqdm", *workload.flags),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{server.name}: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    results = json.loads(done.stdout.splitlines()[-1])
    return {figure: results[figure] for figure in workload.figures}
