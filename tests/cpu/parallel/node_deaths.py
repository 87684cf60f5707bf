"""Deaths and cut cables under 32 streams: `python -m tests.cpu.parallel.node_deaths --each 20`, as root. It
prints a report and exits with 1 when a stream failed or had other tokens or logprobs, when a cut of a second
restarted something, or when anything was left behind.

Two nodes with networks of their own. Of each kind so many, in random order, each at a random moment of its
streams: kill -9 and SIGSTOP of a rank on either node and of the agent; a cable that is cut for 1 s, for 8 s,
and for good, which a new node 1 takes the place of. A stopped agent goes on once node 0 has given it up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from carousel import AsyncClient, SamplingParams
from tests.harness.nodes import Apart, Nodes, apart, nodes
from tests.harness.ring.launched import SLACK, is_alive, leftovers, wait_until

NUM_STREAMS = 32
NUM_TOKENS = 120
TIMEOUT_S = 300.0
DEATH_S, SILENCE_S = 1.0, 5.0
"""Time after which node 0 acts on a death, and on silence."""
BEYOND_S = 2.0
"""Longest pause of a stream beyond the time until node 0 acts and the engine is ready again."""
LOAD_S = 10.0
MOMENT_S = 60.0
CUT_S, LONG_CUT_S = 1.0, 8.0
LOGPROB_ERROR = 1e-4
KINDS = (
    *("kill rank 0", "kill rank 1", "kill agent", "stop rank 0", "stop rank 1", "stop agent"),
    *("cut 1 s", "cut 8 s", "cut for good"),
)
LAYOUTS = {"ranks": (1, 2), "stages": (2, 1)}
SETTINGS = (
    *("--dtype", "float32", "--no-http", "--max-total-tokens", "8192"),
    *("--max-running-requests", str(NUM_STREAMS), "--max-engine-restarts", "10000"),
)


class Wave:
    """Streams, in a thread of their own, and what has come of them."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.tokens: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        self.logprobs: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        self.failed: list[str] = []
        self.longest_gap_s = 0.0
        """Between two pieces of one stream."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have come, of all streams."""
        return sum(map(len, self.tokens))

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "a stream waits for ever"

    async def _run(self) -> None:
        async with AsyncClient(self._run_dir) as client:
            await asyncio.gather(*(self._stream(client, number) for number in range(NUM_STREAMS)))

    async def _stream(self, client: AsyncClient, number: int) -> None:
        asked = SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, seed=number, temperature=float(number % 2), logprobs=1
        )
        last = 0.0
        try:
            async for delta in client.stream(f"def f{number}(x):\n", asked, timeout=TIMEOUT_S):
                now = time.monotonic()
                self.longest_gap_s = max(self.longest_gap_s, now - last if last else 0.0)
                last = now
                self.tokens[number] += delta.token_ids
                self.logprobs[number] += [each.logprob for each in delta.logprobs]
        except Exception as error:
            self.failed.append(f"stream {number}: {type(error).__name__}: {error}")

    def differences(self, expected: Wave) -> list[str]:
        """Name the streams that are not those of another wave."""
        return [
            f"stream {number}: other {what}"
            for number in range(NUM_STREAMS)
            for what, is_same in (
                ("tokens", self.tokens[number] == expected.tokens[number]),
                ("logprobs", _are_near(self.logprobs[number], expected.logprobs[number])),
            )
            if not is_same
        ]


def _are_near(values: list[float], others: list[float]) -> bool:
    return len(values) == len(others) and all(
        abs(a - b) <= LOGPROB_ERROR for a, b in zip(values, others, strict=True)
    )


class Deaths:
    """Two nodes, and what is done to them."""

    def __init__(self, both: Nodes, cable: Apart, rng: random.Random) -> None:
        self._both, self._cable, self._rng = both, cable, rng
        self.wrong: list[str] = []
        self.figures: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
        self._expected = self._wave()
        self._expected.join()
        self.wrong += self._expected.failed

    def _wave(self) -> Wave:
        return Wave(self._both.run_dir)

    def run(self, kind: str) -> None:
        """Do one thing at a random moment of streams, and see them end."""
        moment = self._rng.randrange(NUM_STREAMS, NUM_STREAMS * NUM_TOKENS * 3 // 4)
        wave = self._wave()
        wait_until(
            lambda: wave.num_tokens >= moment or bool(wave.failed), 60.0, "the streams have come so far"
        )
        epoch, began = self._epoch(), time.monotonic()
        self._do(kind, epoch)
        restarts = self._epoch() > epoch
        acted_s = self._acted_at - began
        figures = {"acted_s": acted_s} if restarts else {}
        wait_until(self._is_ready, LOAD_S, f"{kind}: the engine is ready again")
        if restarts:
            figures["load_s"] = time.monotonic() - self._acted_at
        wave.join()
        figures["gap_s"] = wave.longest_gap_s
        if restarts:
            figures["beyond_s"] = wave.longest_gap_s - figures["acted_s"] - figures["load_s"]
        self.figures[kind].append(figures)
        faults = wave.failed + wave.differences(self._expected)
        if figures.get("beyond_s", 0.0) > SLACK * BEYOND_S:
            faults.append(f"a stream paused for {figures['beyond_s']:.1f} s more than it had to")
        if restarts != (kind != "cut 1 s"):
            faults.append(f"it led to {'a' if restarts else 'no'} restart")
        self.wrong += [f"{kind} at token {moment}: {fault}" for fault in faults]

    def _epoch(self) -> int:
        epoch: int = self._both.zero.state()["epoch"]
        return epoch

    def _is_ready(self) -> bool:
        children = self._both.zero.state()["children"]
        return all(child["ready"] for child in children)

    def _await_act(self, epoch: int, limit_s: float) -> None:
        wait_until(lambda: self._epoch() > epoch, limit_s, "node 0 acts")
        self._acted_at = time.monotonic()

    def _do(self, kind: str, epoch: int) -> None:
        both, cable = self._both, self._cable
        self._acted_at = time.monotonic()
        what, _, victim = kind.partition(" ")
        if what == "cut":
            cable.down()
            if victim == "1 s":
                time.sleep(CUT_S)
                cable.up()
                return
            began = time.monotonic()
            self._await_act(epoch, SILENCE_S)
            if victim == "8 s":
                time.sleep(max(0.0, LONG_CUT_S - (time.monotonic() - began)))
                cable.up()
            else:
                both.other.process.kill()
                cable.up()
                both.replace_other()
            return
        pid = both.other.process.pid if victim == "agent" else both.pid_of_rank(int(victim[-1]))
        os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        self._await_act(epoch, DEATH_S if what == "kill" else SILENCE_S)
        if victim == "agent" and what == "kill":
            both.replace_other()
        elif victim == "agent":
            os.kill(pid, signal.SIGCONT)
        else:
            wait_until(lambda: not is_alive(pid), SILENCE_S, f"{kind}: it has ended")


def run(each: int, layout: str = "ranks", seed: int = 1) -> dict[str, Any]:
    """Do so many of each kind, and return what was wrong, what was left, and times."""
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS for _ in range(each)]
    rng.shuffle(kinds)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        apart(Path(folder)) as cable,
        nodes(*SETTINGS, apart=cable, layout=LAYOUTS[layout]) as both,
    ):
        deaths = Deaths(both, cable, rng)
        for kind in kinds:
            deaths.run(kind)
            print(kind, deaths.figures[kind][-1], file=sys.stderr, flush=True)
        pids = [*both.zero.pids(), *both.other.pids()]
        exit_code = both.zero.stop()
        wait_until(lambda: not any(map(is_alive, pids)), 10.0, "all processes end")
        left = leftovers(both.zero.run_dir) | leftovers(both.other.run_dir)
    return {
        "layout": layout,
        "seconds": round(time.monotonic() - began),
        "exit_code": exit_code,
        "wrong": deaths.wrong,
        "left": sorted(left),
        "figures": {kind: _of(deaths.figures[kind]) for kind in KINDS},
    }


def _of(figures: list[dict[str, float]]) -> dict[str, str]:
    """Return median and most of each figure."""
    names = sorted({name for each in figures for name in each})
    values = {name: [each[name] for each in figures if name in each] for name in names}
    return {name: f"{statistics.median(each):.2f}, {max(each):.2f}" for name, each in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cpu.parallel.node_deaths", description=__doc__)
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--layout", choices=LAYOUTS, default="ranks", help="what the nodes share")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    report = run(given.each, given.layout, given.seed)
    print(json.dumps(report, indent=1))
    return int(bool(report["wrong"] or report["left"] or report["exit_code"]))


if __name__ == "__main__":
    sys.exit(main())
