"""Two tenants with keys of their own, one of which tries everything against the other:
`python -m tests.faults.attacks.two_tenants --seconds 60` prints what the other noticed of it, as JSON, a
table, and last the bars that were missed; exits with 1 where one was.

The victim has a hot prefix and asks four times a second. The attacker, at nice 19, makes 500 different
attempts again and again: every route, priorities, the victim's names, salts and prompts, floods of the cache
and of the queue, aborts, profiles, half bodies. Each may have half of the rows, unless `--without-limits`.
The worker sleeps (`tests/harness/ring/sleeping_worker.py`), so that its steps take none of the cores, and
what is compared is the ring; the report says so. `--warm` asks the real worker instead whether the time to
the first token tells the attacker what the victim has in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.attacks.attackers import take_lowest_priority
from tests.faults.attacks.tenant_attempts import (
    ADMIN_PATHS,
    CONTEXT,
    HOT,
    KEYS,
    VICTIM_RID,
    attempts,
    completion,
    http,
)
from tests.harness.ring.launched import ROOT, Launched, launched

ROWS = 8
"""With so few the sleeping worker has a cache of 12,400 tokens."""
SETTINGS = (
    f"--max-running-requests={ROWS}",
    "--max-queued-requests=64",
    f"--context-length={CONTEXT}",
    "--log-level=warning",
)
MAX_TTFT_RATIO, MIN_HIT_SHARE, MIN_P = 1.2, 0.8, 0.01
PERIOD_S = 0.25
OUTPUT = 8
CONNECTIONS = 16


@dataclass(slots=True)
class Noticed:
    """Figures of the victim's requests."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    num_cached: list[int] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)

    def report(self) -> dict[str, Any]:
        hits = [count >= 0.8 * len(HOT) for count in self.num_cached[1:]]
        return {
            "requests": sum(self.statuses.values()),
            "statuses": dict(self.statuses),
            "ttft_ms": _quantiles(self.first_s),
            "gap_ms": _quantiles(self.gaps_s),
            "hit_share": round(sum(hits) / max(1, len(hits)), 3),
            "different_texts": len(self.texts),
        }


def _quantiles(values_s: list[float]) -> dict[str, float]:
    ordered = sorted(values_s)
    places = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {
        name: round(1000 * ordered[int(at * (len(ordered) - 1))], 1) for name, at in places.items() if ordered
    }


# -- the victim --------------------------------------------------------------------------------------------


async def ask(port: int, noticed: Noticed, number: int) -> None:
    """Stream one completion behind the hot prefix, and note what it took."""
    prompt = [*HOT, *random.Random(number).choices(range(7, 200), k=8)]
    body = {
        "model": "carousel-demo",
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    rid = f"X-Request-Id: {VICTIM_RID}-{number % 4}\r\n"
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http("/v1/completions", body, key=KEYS["victim"], headers=rid))
    status, text, last = 0, "", 0.0
    while line := await reader.readline():
        status = status or int(line.split()[1])
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            status = 599
        for choice in event.get("choices", ()):
            if choice["text"]:
                now = time.monotonic()
                (noticed.gaps_s if last else noticed.first_s).append(now - (last or began))
                last, text = now, text + choice["text"]
        if event.get("usage"):
            noticed.num_cached.append(event["usage"]["prompt_tokens_details"]["cached_tokens"])
    writer.close()
    noticed.statuses[status] += 1
    noticed.texts.add(text)


async def be_victim(port: int, seconds: float) -> Noticed:
    noticed, asking = Noticed(), set()
    began = time.monotonic()
    for number in range(int(seconds / PERIOD_S)):
        await asyncio.sleep(max(0.0, began + number * PERIOD_S - time.monotonic()))
        task = asyncio.create_task(ask(port, noticed, number))
        asking.add(task)
        task.add_done_callback(asking.discard)
    await asyncio.gather(*asking)
    return noticed


# -- the attacker ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Learnt:
    """All that the attacker has got to read."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    cached_of_hot: list[int] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    asking: Counter[bytes] = field(default_factory=Counter)
    """Requests in flight by the name that they bear: of two of its own the second one is refused."""


async def attempt(port: int, kind: str, data: bytes, draw: random.Random, learnt: Learnt) -> None:
    names = re.findall(VICTIM_RID.encode() + rb"-\d", data)
    is_alone = not any(learnt.asking[name] for name in names)
    learnt.asking.update(names)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        # One in eight leaves in the middle.
        patience_s = draw.choice((0.2, *[60.0] * 7))
        answer = await asyncio.wait_for(reader.read(-1), 2.0 if kind == "half_body" else patience_s)
    except (TimeoutError, ConnectionError):
        answer = b""
    finally:
        writer.close()
        learnt.asking.subtract(names)
    status = int(answer.split()[1]) if answer else 0
    learnt.statuses.setdefault(kind, Counter())[status] += 1
    path = data.split(b" ")[1].decode()
    if status == 200 and path in ADMIN_PATHS:
        learnt.leaks.append(path)
    if kind == "name" and status not in (0, 200, 429, 503) and is_alone:
        learnt.leaks.append(f"{kind}: {status}")
    if status == 200 and kind in ("salt", "hot_prompt"):
        usage = json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]
        learnt.cached_of_hot.append(usage["prompt_tokens_details"]["cached_tokens"])


async def be_attacker(port: int, seconds: float) -> Learnt:
    learnt, draw = Learnt(), random.Random(1)
    made, next_number, end = attempts(1), 0, time.monotonic() + seconds

    async def repeat() -> None:
        nonlocal next_number
        while time.monotonic() < end:
            kind, data = made[next_number % len(made)]
            next_number += 1
            try:
                await attempt(port, kind, data, draw, learnt)
            except OSError:
                learnt.statuses.setdefault(kind, Counter())[0] += 1

    await asyncio.gather(*(repeat() for _ in range(CONNECTIONS)))
    return learnt


# -- both --------------------------------------------------------------------------------------------------


def key_file(folder: Path, *, has_limits: bool) -> Path:
    path = folder / "keys.toml"
    limits = f"max_running = {ROWS // 2}\nmax_waiting = 16\n" if has_limits else ""
    path.write_text("".join(f'[{name}]\nkey = "{key}"\n{limits}' for name, key in KEYS.items()))
    path.chmod(0o600)
    return path


def measure(launch: Launched, seconds: float) -> dict[str, Any]:
    port = launch.state()["port"]
    pids = launch.pids()
    asyncio.run(be_victim(port, 2.0))
    alone = asyncio.run(be_victim(port, seconds)).report()
    first = Learnt()
    hot = completion(random.Random(), prompt=[*HOT, 7])
    asyncio.run(attempt(port, "hot_prompt", hot, random.Random(5), first))
    attacker = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.faults.attacks.two_tenants",
            f"--attack={port}",
            f"--seconds={seconds + 4}",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        preexec_fn=take_lowest_priority,
    )
    time.sleep(3.0)  # Python starts, and the flood fills what it can
    attacked = asyncio.run(be_victim(port, seconds)).report()
    learnt = json.loads(attacker.communicate()[0])
    ratio = attacked["ttft_ms"]["p99"] / alone["ttft_ms"]["p99"]
    return {
        "worker": "sleeps 50 ms a step, takes none of the cores",
        "alone": alone,
        "attacked": attacked,
        "ttft_p99_ratio": round(ratio, 3),
        "same_processes": launch.pids() == pids,
        "attackers_first_cached_tokens_of_the_hot_prompt": first.cached_of_hot,
        "attacker": learnt,
    }


def same_distribution(first: list[float], second: list[float]) -> float:
    """Return p of the two-sample test of Kolmogorov and Smirnov: small where the two can be told apart."""
    n, m = len(first), len(second)
    marked = sorted([(value, 1.0 / n) for value in first] + [(value, -1.0 / m) for value in second])
    distance = gap = 0.0
    for at, (value, step) in enumerate(marked):
        gap += step
        if at + 1 == len(marked) or marked[at + 1][0] != value:
            distance = max(distance, abs(gap))
    scale: float = math.sqrt(n * m / (n + m))
    x = (scale + 0.12 + 0.11 / scale) * distance
    if x < 0.2:  # where p is 1 and its series does not converge
        return 1.0
    p: float = 2 * sum((1 if k % 2 else -1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return min(1.0, max(0.0, p))


def measure_warm(launch: Launched, num_samples: int, seed: int = 3) -> dict[str, Any]:
    """Compare the attacker's time for prompts that the victim has just asked with that for new ones. seed: of
    the prompts.
    """
    port, draw = launch.state()["port"], random.Random(seed)
    warm: list[float] = []
    cold: list[float] = []
    own: list[float] = []

    async def took_s(prompt: list[int], key: str) -> float:
        body = {"model": "carousel-demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http("/v1/completions", body, key=key))
        assert (await reader.read(-1)).split()[1] == b"200"
        writer.close()
        return time.monotonic() - began

    async def compare() -> None:
        for _ in range(num_samples):
            asked, unknown = draw.choices(range(7, 2000), k=512), draw.choices(range(7, 2000), k=512)
            await took_s(asked, KEYS["victim"])
            pair = [(asked, warm), (unknown, cold)]
            draw.shuffle(pair)
            for prompt, times in pair:
                times.append(await took_s(prompt, KEYS["attacker"]))
            own.append(await took_s(unknown, KEYS["attacker"]))

    asyncio.run(compare())
    return {
        "samples": num_samples,
        "warm_ms": _quantiles(warm),
        "cold_ms": _quantiles(cold),
        "own_warm_ms": _quantiles(own),
        "p": round(same_distribution(warm, cold), 4),
        "p_of_own": round(same_distribution(own, cold), 6),
    }


def missed(report: dict[str, Any]) -> list[str]:
    """The bars that a report of `measure` misses, in words."""
    attacked, attacker, found = report["attacked"], report["attacker"], list[str]()
    if set(report["alone"]["statuses"]) | set(attacked["statuses"]) != {200}:
        found.append(f"the victim was answered {attacked['statuses']}")
    if report["ttft_p99_ratio"] > MAX_TTFT_RATIO:
        found.append(f"TTFT p99 {report['ttft_p99_ratio']} times that of before")
    if attacked["hit_share"] < MIN_HIT_SHARE:
        found.append(f"the hot prefix was cached for {attacked['hit_share']} of the requests")
    if attacked["different_texts"] != report["alone"]["different_texts"]:
        found.append(f"the victim read {attacked['different_texts']} different texts")
    if not report["same_processes"]:
        found.append("a process was replaced")
    if report["attackers_first_cached_tokens_of_the_hot_prompt"] != [0]:
        found.append("the attacker saw cached tokens of the victim's")
    return found + [f"the attacker read {leak}" for leak in attacker["leaks"]]


def table(report: dict[str, Any]) -> str:
    lines = [
        "| victim | requests | TTFT ms: p50 / p99 / most | between tokens ms | hits | texts |",
        "|---" * 6 + "|",
    ]
    for name in ("alone", "attacked"):
        seen = report[name]
        times = [" / ".join(str(each) for each in seen[part].values()) for part in ("ttft_ms", "gap_ms")]
        cells = (name, seen["requests"], *times, seen["hit_share"], seen["different_texts"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.attacks.two_tenants", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm", type=int, default=0, help="so many samples, of the real worker")
    parser.add_argument("--without-limits", action="store_true", help="neither key has limits of its own")
    parser.add_argument("--attack", type=int, default=0, help="be the attacker of the server at this port")
    arguments = parser.parse_args()
    if arguments.attack:
        learnt = asyncio.run(be_attacker(arguments.attack, arguments.seconds))
        print(
            json.dumps(
                {
                    "statuses": {kind: dict(count) for kind, count in learnt.statuses.items()},
                    "cached_of_hot": sorted(Counter(learnt.cached_of_hot).items()),
                    "leaks": sorted(set(learnt.leaks)),
                }
            )
        )
        return 0
    module = "launch" if arguments.warm else "tests.harness.ring.sleeping_worker"
    with tempfile.TemporaryDirectory() as folder:
        has_limits = not arguments.without_limits
        keys = f"--api-keys={key_file(Path(folder), has_limits=has_limits)}"
        with launched(*SETTINGS, keys, module=module) as launch:
            if arguments.warm:
                report = measure_warm(launch, arguments.warm)
                misses = [] if report["p"] > MIN_P else [f"warm and cold are told apart: p = {report['p']}"]
            else:
                report = measure(launch, arguments.seconds)
                misses = missed(report)
    print(json.dumps(report, indent=1))
    if not arguments.warm:
        print(table(report))
    print(f"bars missed: {'; '.join(misses) or 'none'}")
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
