"""The examples of the executor and the batch manager run as scripts, as a user starts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ring.launched import ROOT, Launched

TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def launch(demo_launch: Launched) -> Launched:
    return demo_launch


def run(name: str, *arguments: str | Path) -> list[str]:
    """The lines that an example prints; it must end well and complain of nothing."""
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=ROOT,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    return finished.stdout.splitlines()


def test_one_prompt_a_stream_a_batch_and_a_time_limit() -> None:
    lines = run("executor_generate.py", "--timeout", "0.05")
    names = [
        "Generated",
        "Streaming",
        "Result 0",
        "Result 1",
        "Result 2",
        "Timed out",
        "Active requests",
        "Queued requests",
        "Batch size",
    ]
    # What the model says may have line ends in it.
    found = re.split(rf"^({'|'.join(names)}): ?", "\n".join(lines), flags=re.MULTILINE)
    assert found[1::2] == names
    words = dict(zip(names, found[2::2], strict=True))
    assert all(words[name].strip() for name in ("Generated", "Streaming", "Result 0", "Result 1", "Result 2"))
    assert int(words["Timed out"].split()[0]) < 2000
    assert int(words["Queued requests"]) == 0


def test_enqueued_requests_are_responses_of_each_sequence(launch: Launched) -> None:
    lines = run("executor_responses.py", "--run-dir", launch.run_dir)
    finals = [line for line in lines if line.endswith(" final")]
    assert sorted(re.findall(r"client (\d) request (\d) sequence (\d)", "\n".join(finals))) == [
        ("7", "1", "0"),
        ("7", "1", "1"),
        ("7", "1", "2"),
        ("8", "2", "0"),
    ]
    assert sum(line.endswith("sequence final final") for line in lines) == 2


def test_callbacks_alone_serve(launch: Launched) -> None:
    lines = run("batch_manager_callbacks.py", "--run-dir", launch.run_dir)
    largest = (1 << 64) - 1
    assert (
        sum(line.startswith("request 1: 11 tokens by now") and line.endswith(" final") for line in lines) == 1
    )
    streamed = [line for line in lines if line.startswith(f"request {largest}: ")]
    # Who is slow to ask gets what has come meanwhile as one response.
    assert streamed
    assert [line.endswith(" final") for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert "request 3 failed: input_ids: shape [1, n], got [1, 0]" in lines
    assert int(lines[-1].split()[0]) > 0
