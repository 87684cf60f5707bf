"""Streams beside guides whose masks take milliseconds, and beside usual ones:
`python -m benchmarks.masks.slow_masks [--rounds 3] [--paced]`.

One launch of the demo model with two API keys. One key's requests have guides, eight or sixteen sequences at
a time, or two beam searches of width 8; the other key's streams are measured: milliseconds between two
tokens. With --paced each step of the model takes 30 ms more, in which the worker sleeps. For each line also:
milliseconds that a step waited for masks, and how many masks were late of how many steps.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.masks.paced_worker import MODULE
from benchmarks.server import launched

KEYS = """
[guided]
key = "guided-key"
[others]
key = "others-key"
[operator]
key = "operator-key"
role = "admin"
"""
LENGTH = 150
USUAL = {
    "json": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 400}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
}
NUMBERS = itertools.count()


def slow_guide() -> dict[str, Any]:
    """Return a guide whose masks take milliseconds, another one each time."""
    number = next(NUMBERS)
    if number % 2:
        regex = f"((a|b|c|d|.){{0,{30 + number}}}x(.|\n){{0,{40 + number % 7}}}y?){{10}}"
    else:
        regex = f"(.*a.{{{20 + number % 20}}}|.*b.{{{30 + number // 20}}}|.*c.{{15}}){{3}}.{{500}}"
    return {"regex": regex}


def usual_guide() -> dict[str, Any]:
    return USUAL


class Case(NamedTuple):
    """Sequences with guides of one key, and streams of another."""

    num_guided: int
    guide: Callable[[], dict[str, Any]]
    num_streams: int
    stream: dict[str, Any]
    num_callers: int = 1
    key: str = "others-key"
    """Key of the streams."""
    is_search: bool = False
    """True if the sequences are beams of one search."""


CASES = {
    "alone": Case(0, usual_guide, 1, {}),
    "8 usual": Case(8, usual_guide, 1, {}),
    "16 usual": Case(16, usual_guide, 4, {}),
    "16 usual, nobody else": Case(16, usual_guide, 0, {}),
    "slow": Case(8, slow_guide, 1, {}, 2),
    "slow, usual stream": Case(8, slow_guide, 1, {"structured_outputs": USUAL}, 2),
    "slow, same key": Case(8, slow_guide, 1, {}, 2, "guided-key"),
    "slow searches": Case(8, slow_guide, 1, {}, 2, is_search=True),
}


class Server:
    def __init__(self, url: str) -> None:
        self._port = int(url.rsplit(":", 1)[1])

    def ask(
        self, key: str, path: str, body: dict[str, Any] | None = None, also: int = 200
    ) -> http.client.HTTPResponse:
        """Send a request. also: status that is no error, besides 200. Raises RuntimeError."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300.0)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        sent = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, body=sent, headers=headers)
        answer = connection.getresponse()
        if answer.status not in (200, also):
            raise RuntimeError(f"{path}: {answer.status} {answer.read()[:300]!r}")
        return answer

    def counts(self) -> dict[str, float]:
        info: dict[str, float] = json.loads(self.ask("operator-key", "/server_info").read())
        return info

    def stream(self, case: Case) -> list[float]:
        """Return milliseconds between the tokens of one stream."""
        body = {"prompt": "def f(", "max_tokens": LENGTH, "ignore_eos": True, "stream": True, **case.stream}
        answer = self.ask(case.key, "/v1/completions", body)
        times = [time.perf_counter() * 1e3 for line in answer if line.startswith(b"data: {")]
        return [after - before for before, after in itertools.pairwise(times)]

    def guided(self, case: Case, until: threading.Event, took: list[float]) -> None:
        """Send requests with guides, one after the other; notes milliseconds of each by token. Guides that
        turn out to be too complex end early.
        """
        while not until.is_set():
            began = time.perf_counter()
            body = {"prompt": "x", "max_tokens": LENGTH, "ignore_eos": True, "n": case.num_guided}
            body["structured_outputs"] = case.guide()
            if case.is_search:
                body |= {"use_beam_search": True, "temperature": 0.0}
            answer = self.ask("guided-key", "/v1/completions", body, also=400)
            made, took_ms = json.loads(answer.read()), (time.perf_counter() - began) * 1e3
            if answer.status == 200:
                took.append(took_ms * case.num_guided / made["usage"]["completion_tokens"])


def run(server: Server, case: Case) -> dict[str, float]:
    """Return the figures of a case, measured while three streams end one after the other."""
    gaps: list[float] = []
    took: list[float] = []
    until = threading.Event()
    callers = [
        threading.Thread(target=server.guided, args=(case, until, took))
        for _ in range(case.num_callers if case.num_guided else 0)
    ]

    def streams() -> None:
        for _ in range(3):
            gaps.extend(server.stream(case))

    streaming = [threading.Thread(target=streams) for _ in range(case.num_streams)]
    for each in callers:
        each.start()
    time.sleep(0.3)
    before = server.counts()
    for each in streaming:
        each.start()
    for each in streaming:
        each.join()
    if not streaming:
        time.sleep(2.0)
    after = server.counts()
    until.set()
    for each in callers:
        each.join()
    num_steps, wait_s, num_late = (
        after[name] - before[name] for name in ("num_iterations", "mask_wait_s", "num_late_masks")
    )
    return {
        "mean": statistics.fmean(gaps) if gaps else 0.0,
        "median": statistics.median(gaps) if gaps else 0.0,
        "p99": float(np.percentile(gaps, 99)) if gaps else 0.0,
        "guided": statistics.fmean(took) if took else 0.0,
        "wait": wait_s * 1e3 / max(1.0, num_steps),
        "late": num_late,
        "steps": num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--paced", action="store_true", help="steps take 30 ms more")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    module = MODULE if options.paced else ""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.touch(mode=0o600)
        keys.write_text(KEYS)
        with launched("--api-keys", str(keys), "--max-beam-width", "8", module=module) as started:
            server = Server(started.url)
            run(server, CASES["alone"])
            for _ in range(options.rounds):
                for name in options.cases:
                    found = run(server, CASES[name])
                    figures = " ".join(f"{what} {value:.1f}" for what, value in found.items())
                    print(f"{name:22} {figures}", flush=True)


if __name__ == "__main__":
    main()
