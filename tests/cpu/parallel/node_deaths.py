"""Deaths and cut cables under 32 streams: `python -m tests.cpu.parallel.node_deaths --each 20`, as root. It
prints a report and exits with 1 when a stream failed or had other tokens or logprobs, when a cut of a second
restarted something, or when anything was left behind.

Two nodes with networks of their own. Of each kind so many, in random order, each at a random moment of its
streams: kill -9 and SIGSTOP of a rank on either node and of the agent; kill -9 of a rank in a call to it; a
cable that is cut for 1 s, for 8 s, and for good, which a new node 1 takes the place of. A stopped agent goes
on once node 0 has given it up.
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from carousel import AsyncClient, Client, RequestError, SamplingParams
from tests.harness.nodes import Nodes, apart, nodes
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
SLOW_S = 0.05
"""Time that a slow cable takes while an agent is stopped: the streams that nobody holds up are not over when
node 0 gives it up.
"""
LOGPROB_ERROR = 1e-4
KINDS = (
    *("kill rank 0", "kill rank 1", "kill agent", "stop rank 0", "stop rank 1", "stop agent"),
    *("call that kills rank 1", "cut 1 s", "cut 8 s", "cut for good"),
)
SIX = ("stop agent", "kill rank 0", "stop rank 1", "call that kills rank 1", "cut 1 s", "kill agent")
LAYOUTS = {"ranks": (1, 2), "stages": (2, 1)}
SETTINGS = (
    *("--dtype", "float32", "--no-http", "--max-total-tokens", "8192"),
    *("--max-running-requests", str(NUM_STREAMS), "--max-engine-restarts", "10000"),
    *("--worker-extension-cls", "tests.harness.probe:Probe"),
)


class Wave:
    """Streams, in a thread of their own, and what has come of them."""

    def __init__(self, run_dir: Path, num_tokens: int = NUM_TOKENS) -> None:
        """`num_tokens`: of each stream, in the end."""
        self._run_dir = run_dir
        self.stream_len = num_tokens
        self.texts = [""] * NUM_STREAMS
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

    @property
    def is_over(self) -> bool:
        """True when all streams have ended."""
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "a stream waits for ever"

    async def _run(self) -> None:
        async with AsyncClient(self._run_dir) as client:
            await asyncio.gather(*(self._stream(client, number) for number in range(NUM_STREAMS)))

    async def _stream(self, client: AsyncClient, number: int) -> None:
        asked = SamplingParams(
            max_tokens=self.stream_len,
            ignore_eos=True,
            seed=number,
            temperature=float(number % 2),
            logprobs=1,
        )
        last = 0.0
        try:
            async for delta in client.stream(f"def f{number}(x):\n", asked, timeout=TIMEOUT_S):
                now = time.monotonic()
                self.longest_gap_s = max(self.longest_gap_s, now - last if last else 0.0)
                last = now
                self.texts[number] += delta.text
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
                ("text", self.texts[number] == expected.texts[number]),
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

    def __init__(self, both: Nodes, rng: random.Random, expected: Wave) -> None:
        """`expected`: streams of an undisturbed run, which may go on still."""
        self._both, self._rng, self._expected = both, rng, expected
        self.wrong: list[str] = []
        self.figures: defaultdict[str, list[dict[str, float]]] = defaultdict(list)

    def run(self, kind: str) -> None:
        """Do one thing at a random moment of streams, and see them end."""
        moment = self._rng.randrange(NUM_STREAMS, NUM_STREAMS * NUM_TOKENS * 3 // 4)
        wave = Wave(self._both.run_dir)
        self._await_tokens(wave, moment)
        figures = self._happen(kind, moment)
        wave.join()
        figures["gap_s"] = wave.longest_gap_s
        if "acted_s" in figures:
            beyond_s = figures["beyond_s"] = wave.longest_gap_s - figures["acted_s"] - figures["load_s"]
            if beyond_s > SLACK * BEYOND_S:
                self.wrong.append(
                    f"{kind} at token {moment}: a stream paused {beyond_s:.1f} s more than it had to"
                )
        self._compare(wave, f"{kind} at token {moment}")

    def run_in_turn(self, kinds: Iterable[str], most: int) -> None:
        """Do one thing after the other to the same streams, each after 1 to `most` tokens more of each."""
        wave = Wave(self._both.run_dir, self._expected.stream_len)
        for kind in kinds:
            moment = wave.num_tokens + NUM_STREAMS + self._rng.randrange(NUM_STREAMS * (most - 1))
            self._await_tokens(wave, moment)
            if wave.is_over:
                self.wrong.append(f"{kind} at token {moment}: there is no stream any more")
            self._happen(kind, moment)
        wave.join()
        self._expected.join()
        self._compare(wave, "all")

    def _await_tokens(self, wave: Wave, count: int) -> None:
        wait_until(
            lambda: wave.num_tokens >= count or bool(wave.failed) or wave.is_over,
            60.0,
            f"the streams have {count} tokens",
        )

    def _compare(self, wave: Wave, when: str) -> None:
        faults = self._expected.failed + wave.failed + wave.differences(self._expected)
        self.wrong += [f"{when}: {fault}" for fault in faults]

    def _happen(self, kind: str, moment: int) -> dict[str, float]:
        """Do it, and wait until the engine is ready again. Returns how long that took."""
        epoch, began = self._epoch(), time.monotonic()
        self._do(kind, epoch)
        restarts = self._epoch() > epoch
        figures = {"acted_s": self._acted_at - began} if restarts else {}
        wait_until(self._is_ready, LOAD_S, f"{kind}: the engine is ready again")
        if restarts:
            figures["load_s"] = time.monotonic() - self._acted_at
        self.figures[kind].append(figures)
        if restarts != (kind != "cut 1 s"):
            self.wrong.append(f"{kind} at token {moment}: it led to {'a' if restarts else 'no'} restart")
        return figures

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
        self._acted_at = time.monotonic()
        what, *_, victim = kind.split()
        match what:
            case "cut":
                self._cut(kind, epoch)
            case "call":
                # The call is answered once the engine is there again.
                with Client(self._both.run_dir) as client, ThreadPoolExecutor(1) as pool:
                    call = pool.submit(self._call_what_ends, client, int(victim))
                    self._await_act(epoch, DEATH_S)
                    call.result()
            case _ if victim == "agent":
                self._end_agent(epoch, is_killed=what == "kill")
            case _:
                pid = self._both.pid_of_rank(int(victim))
                os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                self._await_act(epoch, DEATH_S if what == "kill" else SILENCE_S)
                wait_until(lambda: not is_alive(pid), SILENCE_S, f"{kind}: it has ended")

    def _cut(self, kind: str, epoch: int) -> None:
        both, cable = self._both, self._both.cable
        if kind == "cut 1 s":
            both.cut_off(CUT_S)
            with Client(both.run_dir) as client:
                answers = client.collective_rpc("ping", timeout=TIMEOUT_S)
            if len({answer["num_steps"] for answer in answers}) != 1:
                self.wrong.append(f"{kind}: ranks were called between other steps: {answers}")
            return
        assert cable is not None
        cable.down()
        began = time.monotonic()
        self._await_act(epoch, SILENCE_S)
        if kind == "cut 8 s":
            time.sleep(max(0.0, LONG_CUT_S - (time.monotonic() - began)))
            cable.up()
        else:
            both.other.process.kill()
            cable.up()
            both.replace_other()

    def _call_what_ends(self, client: Client, rank: int) -> None:
        """Call a rank, which is killed in the call."""
        try:
            client.collective_rpc("end_on", [rank], timeout=TIMEOUT_S)
        except RequestError as error:
            if error.code != "worker_failed" or "collective_rpc" not in str(error):
                self.wrong.append(f"the call that killed rank {rank}: {error.code}: {error}")
        else:
            self.wrong.append(f"the call that killed rank {rank} was answered")

    def _end_agent(self, epoch: int, *, is_killed: bool) -> None:
        both, agent = self._both, self._both.other.process
        if is_killed:
            agent.kill()
            self._await_act(epoch, DEATH_S)
            both.replace_other()
            return
        with both.slow(SLOW_S):
            os.kill(agent.pid, signal.SIGSTOP)
            self._await_act(epoch, SILENCE_S)
        os.kill(agent.pid, signal.SIGCONT)


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
        expected = Wave(both.run_dir)
        expected.join()
        deaths = Deaths(both, rng, expected)
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
