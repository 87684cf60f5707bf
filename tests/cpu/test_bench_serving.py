"""The load generator against a real launch of the demo model, over HTTP and over the client library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.launched import ROOT, Launched, launched

LOAD = ("--num-prompts", "6", "--random-input-len", "24", "--random-output-len", "8", "--disable-tqdm")


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    with launched("--dtype", "float32", "--cpu-threads", "1", "--max-running-requests", "8") as launch:
        yield launch


def bench(*flags: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, JSON of the last line, everything printed)"""
    done = subprocess.run(
        [sys.executable, "-m", "bench_serving", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def address(launch: Launched, backend: str) -> tuple[str, ...]:
    if backend == "sdk":
        return ("--backend", "sdk", "--run-dir", str(launch.run_dir))
    return ("--backend", backend, "--base-url", launch.url)


@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("carousel", ("--dataset-name", "random-ids")),
        ("carousel", ("--dataset-name", "random", "--request-rate", "50", "--max-concurrency", "2")),
        ("carousel", ("--dataset-name", "random", "--disable-stream", "--apply-chat-template")),
        ("openai-chat", ("--dataset-name", "multi-turn", "--num-turns", "2")),
        ("sdk", ("--dataset-name", "random-ids")),
        ("sdk", ("--dataset-name", "multi-turn", "--num-turns", "2", "--disable-stream")),
    ],
)
def test_every_request_completes_with_all_its_tokens(
    launch: Launched, backend: str, flags: tuple[str, ...]
) -> None:
    code, result, printed = bench(*address(launch, backend), *LOAD, *flags)
    assert code == 0, printed
    assert result["completed"] == (12 if "multi-turn" in flags else 6)
    assert (result["failed"], result["ended_early"]) == (0, 0)
    assert result["total_output_tokens"] >= result["completed"]
    assert (result["mean_ttft_ms"] is None) == ("--disable-stream" in flags)


def test_http_and_client_library_count_the_same_tokens(launch: Launched) -> None:
    flags = (*LOAD, "--dataset-name", "random-ids", "--seed", "5")
    _, http, _ = bench(*address(launch, "carousel"), *flags)
    _, sdk, _ = bench(*address(launch, "sdk"), *flags)
    for name in ("total_input_tokens", "total_output_tokens"):
        assert http[name] == sdk[name]
    assert sdk["itl_source"] == "token counts"


def test_a_shared_prefix_is_found_in_the_cache(launch: Launched) -> None:
    code, result, printed = bench(
        *address(launch, "carousel"),
        *(
            "--dataset-name",
            "generated-shared-prefix",
            "--gsp-num-groups",
            "2",
            "--gsp-prompts-per-group",
            "3",
        ),
        *("--gsp-system-prompt-len", "64", "--gsp-question-len", "4", "--gsp-output-len", "2"),
        *("--max-concurrency", "1", "--disable-tqdm"),
    )
    assert code == 0, printed
    # Of each group's three prompts the last two find the system prompt's four pages of 16 tokens.
    assert result["cached_input_tokens"] >= 2 * 2 * 48


@pytest.mark.parametrize("backend", ["carousel", "sdk"])
def test_what_the_server_refuses_is_a_failure_and_the_exit_code_says_so(
    launch: Launched, backend: str
) -> None:
    code, result, printed = bench(
        *address(launch, backend),
        *("--dataset-name", "random-ids", "--random-input-len", "3000", "--random-range-ratio", "1"),
        *("--num-prompts", "2", "--warmup-requests", "0", "--disable-tqdm"),
    )
    assert code == 1
    assert (result["completed"], result["failed"]) == (0, 2)
    assert "3000 tokens" in printed
