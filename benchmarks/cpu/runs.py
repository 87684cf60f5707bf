"""Runs of a comparison, kept as one line of JSON each in a file, so that a comparison can be made in several
sittings.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cpu.workloads import WORKLOADS, Workload
from benchmarks.process_cpu import machine_busy, pss_bytes, tree_cpu, tree_pids

WARM_UP = 0
"""Number of the warm-up round, which does not count: servers compile, and caches and allocators fill."""
SEEDS_OF_A_TRY = 1000
"""Distance between the seeds of two tries. Rounds use fewer seeds than this."""


class Server(NamedTuple):
    name: str
    backend: str
    url: str
    pid: int | None = None
    """Pid of its first process; the memory of the whole process tree is measured."""

    @staticmethod
    def parse(text: str) -> Server:
        name, _, rest = text.partition("=")
        backend, _, address = rest.partition("@")
        url, _, pid = address.partition("#")
        if not (name and backend and url) or not (pid.isdigit() or "#" not in address):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=BACKEND@URL or NAME=BACKEND@URL#PID")
        return Server(name, backend, url, int(pid) if pid else None)


class Turn(NamedTuple):
    """Run of a comparison."""

    round: int
    workload: str
    server: Server

    @property
    def key(self) -> tuple[int, str, str]:
        return self.round, self.workload, self.server.name


def all_turns(rounds: int, workloads: Sequence[str], servers: Sequence[Server]) -> Iterator[Turn]:
    """Yield all runs of a comparison. Servers take turns, so that other work on the machine affects all of
    them.
    """
    for number in range(WARM_UP, rounds + 1):
        for workload in workloads:
            for server in servers:
                yield Turn(number, workload, server)


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return the file's lines; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def turns_left(
    turns: Iterator[Turn], runs: Sequence[dict[str, Any]], max_others: float, max_tries: int
) -> list[Turn]:
    """Return the turns without a run during which others used at most `max_others` cores, and with fewer than
    `max_tries` runs.
    """
    tries = Counter(map(_key, runs))
    quiet = {_key(run) for run in runs if is_quiet(run, max_others)}
    return [turn for turn in turns if turn.key not in quiet and tries[turn.key] < max_tries]


def is_quiet(run: dict[str, Any], max_others: float) -> bool:
    return float(run["others_cores"]) <= max_others


def _key(run: dict[str, Any]) -> tuple[int, str, str]:
    return run["round"], run["workload"], run["server"]


def seed_of(turn: Turn, runs: Sequence[dict[str, Any]], seed: int) -> int:
    """Return the seed for the prompts of a turn's next run. A repeated run has other prompts, because the
    server's cache still has those of the first. seed: of the warm-up.
    """
    repeats = WORKLOADS[turn.workload].repeats
    tries = Counter(map(_key, runs))[turn.round, repeats or turn.workload, turn.server.name]
    if repeats:
        tries = max(0, tries - 1)  # the last run's prompts
    return seed + turn.round + SEEDS_OF_A_TRY * tries


@contextmanager
def stopped_between_turns(stopped: Sequence[Server], server: Server) -> Iterator[None]:
    """Context manager that stops the processes of the other servers in `stopped` during a turn
    of `server`.
    """
    pids = [pid for other in stopped if other != server for pid in tree_pids(other.pid or 0)]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


def run_and_note(turn: Turn, model: Path, seed: int, path: Path) -> None:
    """Make one run with prompts of that seed, and append its result to the file: the workload's figures; for
    a server with a known pid its CPU seconds and its memory afterwards; and the cores that all others took. A
    server without pid counts among the others. Raises RuntimeError if a request failed.
    """
    began, before, served = time.monotonic(), machine_busy(), _served_s(turn.server)
    own = sum(os.times()[:4])
    figures = _measure(turn.server, WORKLOADS[turn.workload], model, seed)
    cpu_s = _served_s(turn.server) - served
    others_s = machine_busy() - before - cpu_s - (sum(os.times()[:4]) - own)
    line = {"round": turn.round, "workload": turn.workload, "server": turn.server.name}
    line |= {"figures": figures, "others_cores": max(0.0, others_s / (time.monotonic() - began))}
    if turn.server.pid is not None:
        line |= {"cpu_s": cpu_s, "pss_mib": pss_bytes(turn.server.pid) / 2**20}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _served_s(server: Server) -> float:
    return 0.0 if server.pid is None else tree_cpu(server.pid)


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
