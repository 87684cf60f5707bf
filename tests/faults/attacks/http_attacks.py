"""Costs that callers without a key can cause: `python -m tests.faults.attacks.http_attacks [--seconds 40]
[--key | --no-key] [--tls] [NAME ...]` attacks a launch with bytes of each kind that
`tests/faults/attacks/attackers.py` knows, one kind after another, while /live is asked all the time and eight
callers stream. Prints a table, and last how many bars were missed; exits with 1 where one was.

With `--tls` the launch serves HTTPS, and all speak TLS but those that attack with handshakes alone.

With `--key` the launch has keys: attackers have one of an ordinary user (role `user`), and the callers
another one; each may have half of the rows. With `--no-key` the attackers of such a launch have none.

The eight streams have each of their 20 steps a second together. So one late step is the p99 of a run of 5 s,
where the loop need have no part in it; 20 s or more tell one from several.

The worker sleeps and takes no core (`tests/harness/ring/sleeping_worker.py`), so that what is measured is the
HTTP server. Attackers run at the lowest priority, callers and /live at the normal one. The first line is the
launch with nobody attacking it, which the streams of the others are compared to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carousel.server.http.body_pool import POOL_BYTES
from tests.faults.attacks.attack import KEY_VARIABLE, LIVE, TRUST_VARIABLE
from tests.faults.attacks.attackers import ATTACKS, TLS_ATTACKS
from tests.faults.attacks.metered_launch import take_held
from tests.harness.http.tls import CERTIFICATE, FILES
from tests.harness.ring.launched import ROOT, Launched, launched
from tests.harness.ring.resources import memory_mb

SETTINGS = ("--max-total-tokens=65536", "--log-level=warning")
NUM_STREAMS = 8
MAX_TOKENS = 200
STREAM = json.dumps(
    {"prompt": "Once", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
).encode()
ROWS = 64
KEYS = {"caller": "key-of-the-caller", "attacker": "key-of-the-attacker"}
MAX_ALONE_S = 60.0
PROBE_S = 0.02
LOOK_S = 0.2
PAUSE_S = 3.0
"""Between two attacks, so that what one has left is not the next one's."""
MAX_GROWTH_MB = 64
POOL_MB = POOL_BYTES >> 20
MAX_LIVE_MS = {"p99.9": 50.0, "most": 250.0}
MAX_GAP_RATIO = 1.2
WRONG_ANSWERS = ("500", "failed stream")
"""Answers that no attacker may get: an attack by streams that end in errors is none."""


@dataclass(slots=True)
class Seen:
    """Times that callers at normal priority saw, in seconds."""

    live_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between two events of a stream."""
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Door:
    """Port of the launch, and with TLS the certificates that callers trust."""

    port: int
    trust: ssl.SSLContext | None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = None if self.trust is None else "localhost"
        return await asyncio.open_connection(
            "127.0.0.1", self.port, limit=1 << 20, ssl=self.trust, server_hostname=name
        )


async def ask_live(door: Door, seen: Seen) -> None:
    """Ask on a new connection each time."""
    while True:
        began = time.monotonic()
        try:
            reader, writer = await door.open()
            writer.write(LIVE)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head:
                seen.failed.append(f"/live: {head[:40]!r}")
            writer.close()
        except (OSError, EOFError) as error:
            seen.failed.append(f"/live: {error!r}")
        seen.live_s.append(time.monotonic() - began)
        await asyncio.sleep(PROBE_S)


async def stream(door: Door, seen: Seen) -> None:
    """Read one streamed answer after another."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEYS['caller']}\r\n"
    )
    request = f"{head}Content-Length: {len(STREAM)}\r\n\r\n".encode() + STREAM
    while True:
        try:
            reader, writer = await door.open()
            writer.write(request)
            await _read_events(reader, seen)
            writer.close()
        except (OSError, EOFError) as error:
            seen.failed.append(f"stream: {error!r}")
            await asyncio.sleep(0.5)


async def _read_events(reader: asyncio.StreamReader, seen: Seen) -> None:
    num_events, last_s = 0, 0.0
    while (event := await reader.readuntil(b"\n\n")) and b"[DONE]" not in event:
        now_s = time.monotonic()
        if num_events:
            seen.gaps_s.append(now_s - last_s)
        num_events, last_s = num_events + 1, now_s
    if num_events < MAX_TOKENS // 2:
        seen.failed.append(f"stream: {num_events} events")


async def look_at_memory(launch: Launched, most: dict[str, int]) -> None:
    """Note the most memory of each process, by its name."""
    while True:
        for name, mb in _memory(launch).items():
            most[name] = max(most.get(name, 0), mb)
        await asyncio.sleep(LOOK_S)


def _memory(launch: Launched) -> dict[str, int]:
    names = {launch.process.pid: "launcher"}
    names |= {child["pid"]: child["role"] for child in launch.state()["children"]}
    return {names[pid]: mb for pid, mb in memory_mb(names).items()}


async def attacked(
    launch: Launched, name: str, seconds: float, connections: int, *, key: str = "", has_tls: bool = False
) -> dict[str, Any]:
    """Measure for so long, or until so many connections have been opened; without attackers if the name is
    empty. key: that of the attackers.
    """
    port, seen, most = launch.state()["port"], Seen(), dict[str, int]()
    door = Door(port, ssl.create_default_context(cafile=str(CERTIFICATE)) if has_tls else None)
    before, pids = _memory(launch), launch.pids()
    calling = [
        asyncio.create_task(ask_live(door, seen)),
        asyncio.create_task(look_at_memory(launch, most)),
        *(asyncio.create_task(stream(door, seen)) for _ in range(NUM_STREAMS)),
    ]
    await asyncio.sleep(1.0)
    take_held(launch.run_dir)
    answered: dict[str, Any] = {}
    if name:
        attacker = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.faults.attacks.attackers", name, str(port), str(seconds), str(connections)),
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, KEY_VARIABLE: key, TRUST_VARIABLE: str(CERTIFICATE) * has_tls},
        )
        answered = json.loads((await attacker.communicate())[0])
    else:
        await asyncio.sleep(min(seconds, MAX_ALONE_S))
    held = take_held(launch.run_dir)
    for task in calling:
        task.cancel()
    for task in calling:
        with suppress(asyncio.CancelledError):
            await task
    growth = {each: most[each] - mb for each, mb in before.items()}
    return {
        "attack": name or "none",
        "live_ms": _shown(seen.live_s, (("p50", 0.5), ("p99.9", 0.999), ("most", 1.0))),
        "gap_ms": _shown(seen.gaps_s, (("p50", 0.5), ("p99", 0.99), ("most", 1.0))),
        "held_ms": {"cpu": round(1e3 * held.cpu_s, 1), "wall": round(1e3 * held.wall_s, 1)},
        "growth_mb": growth,
        "failed": seen.failed[:5],
        "replaced": launch.pids() != pids,
        **answered,
    }


def _shown(seconds: list[float], parts: Sequence[tuple[str, float]]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {name: round(1e3 * ordered[int(part * (len(ordered) - 1))], 1) for name, part in parts if ordered}


def missed(report: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    """The bars that a report misses, in words. alone: the report of the launch with nobody attacking it."""
    found = [
        f"{role} grew by {mb} MB"
        for role, mb in report["growth_mb"].items()
        if mb > MAX_GROWTH_MB + POOL_MB * (role == "api")
    ]
    found += [
        f"/live {name} {report['live_ms'][name]} ms"
        for name, most_ms in MAX_LIVE_MS.items()
        if report["live_ms"].get(name, 1e6) > most_ms
    ]
    if report["gap_ms"].get("p99", 1e6) > MAX_GAP_RATIO * alone["gap_ms"]["p99"]:
        found.append(f"gap p99 {report['gap_ms'].get('p99')} ms")
    found += [f"{status} answered" for status in report.get("statuses", {}) if status in WRONG_ANSWERS]
    failed: list[str] = report["failed"]
    return found + ["a process was replaced"] * report["replaced"] + failed


def row(report: dict[str, Any], misses: Sequence[str]) -> str:
    role, mb = max(report["growth_mb"].items(), key=lambda each: each[1])
    live, gap, held = report["live_ms"], report["gap_ms"], report["held_ms"]
    cells = [
        report["attack"],
        str(report.get("opened", "")),
        str(report.get("sent_mib", "")),
        f"{live.get('p50')} / {live.get('p99.9')} / {live.get('most')}",
        f"{held['cpu']} / {held['wall']}",
        f"{gap.get('p50')} / {gap.get('p99')} / {gap.get('most')}",
        f"{report['growth_mb']['api']} (api), {mb} ({role})",
        ", ".join(f"{count} × {status}" for status, count in sorted(report.get("statuses", {}).items())),
        "; ".join(misses) or "none",
    ]
    return f"| {' | '.join(cells)} |"


HEADS = (
    "attack",
    "connections",
    "MiB sent",
    "/live ms: p50 / p99.9 / most",
    "longest turn of the loop ms: CPU / wall",
    "ms between events: p50 / p99 / most",
    "growth MB",
    "answers",
    "bars missed",
)


@contextmanager
def started(*, has_keys: bool, has_tls: bool) -> Iterator[Launched]:
    """A launch that anybody may ask, or only who has one of the KEYS."""
    tls = [f"--{name.replace('_', '-')}={path}" for name, path in FILES.items()] if has_tls else []
    with tempfile.TemporaryDirectory() as folder:
        keys: list[str] = []
        if has_keys:
            path = Path(folder) / "keys.toml"
            limits = f"max_running = {ROWS // 2}\n"
            path.write_text("".join(f'[{name}]\nkey = "{key}"\n{limits}' for name, key in KEYS.items()))
            path.chmod(0o600)
            keys = [f"--api-keys={path}", f"--max-running-requests={ROWS}"]
        with launched(*SETTINGS, *tls, *keys, module="tests.faults.attacks.metered_launch") as launch:
            yield launch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.attacks.http_attacks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="for each attack")
    parser.add_argument("--connections", type=int, default=1 << 40, help="most in all of an attack")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--key", action="store_true", help="attackers have an ordinary user's key")
    keys.add_argument("--no-key", action="store_true", help="callers have keys, attackers have none")
    parser.add_argument("--tls", action="store_true", help="over HTTPS, with attacks by TLS alone")
    parser.add_argument("--json", type=Path, help="where all figures go, too")
    known = ATTACKS | TLS_ATTACKS
    parser.add_argument("names", nargs="*", choices=[*known, []], metavar="NAME", help=", ".join(known))
    arguments = parser.parse_args()
    reports: list[dict[str, Any]] = []
    num_missed = 0
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    form = {"key": KEYS["attacker"] * arguments.key, "has_tls": arguments.tls}
    with started(has_keys=arguments.key or arguments.no_key, has_tls=arguments.tls) as launch:
        for name in ("", *(arguments.names or (known if arguments.tls else ATTACKS))):
            report = asyncio.run(attacked(launch, name, arguments.seconds, arguments.connections, **form))
            reports.append(report)
            misses = missed(report, reports[0])
            num_missed += len(misses)
            print(row(report, misses), flush=True)
            time.sleep(PAUSE_S)
    print(f"{len(reports) - 1} attacks of {arguments.seconds:g} s, {num_missed} bars missed")
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=1))
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
