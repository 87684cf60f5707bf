"""The load generator against a real launch of the demo model, over HTTP and over the client library."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from bench_serving.main import main
from runtime.settings.config import DEMO_MODEL
from tests.harness.ring.launched import ROOT, SLACK, Launched

LOAD = ("--num-prompts", "6", "--random-input-len", "24", "--random-output-len", "8", "--disable-tqdm")


@pytest.fixture(scope="module")
def launch(demo_launch: Launched) -> Launched:
    return demo_launch


def bench(*flags: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, JSON of the last line, everything printed)"""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = main(flags)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("{")]
    assert lines, out.getvalue()
    return code, json.loads(lines[-1]), out.getvalue()


def address(launch: Launched, backend: str) -> tuple[str, ...]:
    if backend == "sdk":
        return ("--backend", "sdk", "--run-dir", str(launch.run_dir))
    return ("--backend", backend, "--base-url", launch.url, "--tokenizer", str(DEMO_MODEL))


def test_it_is_a_command(launch: Launched) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench_serving", *address(launch, "carousel"), *LOAD, "--goodput", "e2el:1e9"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["completed"], result["goodput_share"]) == (6, 1.0)


def test_the_server_says_where_its_tokenizer_is(launch: Launched) -> None:
    flags = ("--backend", "carousel", "--base-url", launch.url, "--dataset-name", "random-ids")
    code, _, printed = bench(*flags, *LOAD)
    assert code == 0, printed
    assert f"model demo, tokenizer {DEMO_MODEL}" in printed


@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("carousel", ("--dataset-name", "random-ids")),
        ("carousel", ("--dataset-name", "random", "--request-rate", "50", "--max-concurrency", "2")),
        ("carousel", ("--dataset-name", "random", "--disable-stream", "--apply-chat-template")),
        ("openai-chat", ("--dataset-name", "multi-turn", "--num-turns", "2")),
        ("carousel-chat", ("--dataset-name", "random", "--request-rate", "50", "--burstiness", "0.5")),
        ("sglang", ("--dataset-name", "random", "--apply-chat-template")),
        ("sglang", ("--dataset-name", "random-ids", "--disable-stream")),
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
    assert http["itl_source"] == sdk["itl_source"] == "token counts"


def compare_with_metrics(launch: Launched, input_len: int, num_prompts: int, *flags: str, rel: float) -> None:
    """Counts are the server's; times are its own but for `rel` of them."""
    code, result, printed = bench(
        *address(launch, "carousel"),
        *("--dataset-name", "random-ids", "--num-prompts", str(num_prompts), "--random-range-ratio", "0.5"),
        *("--random-input-len", str(input_len), "--random-output-len", "32"),
        *("--disable-tqdm", "--check-metrics", *flags),
    )
    # The command itself fails where times differ by more than 3 %.
    assert code == 0 or rel > 0.03, printed
    server = result["server_metrics"]
    assert (result["completed"], result["failed"]) == (num_prompts, 0)
    assert server["finished"] == num_prompts
    assert server["prompt_tokens"] == result["total_input_tokens"]
    assert server["output_tokens"] == result["total_output_tokens"]
    times = {"mean_e2e_latency_ms": "e2e_sum"}
    if "--disable-stream" not in flags:
        assert server["ttft_count"] == num_prompts
        times["mean_ttft_ms"] = "ttft_sum"
    for here, there in times.items():
        assert result[here] == pytest.approx(1e3 * server[there] / num_prompts, rel=rel)


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-concurrency", "6", "--seed", "21"),
        ("--max-concurrency", "6", "--seed", "23", "--disable-stream"),
    ],
)
def test_the_figures_agree_with_the_servers_own_metrics(launch: Launched, flags: tuple[str, ...]) -> None:
    compare_with_metrics(launch, 200, 6, *flags, rel=SLACK)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        ("--max-concurrency", "6", "--seed", "21"),
        ("--request-rate", "6", "--seed", "22"),
        ("--max-concurrency", "6", "--seed", "23", "--disable-stream"),
    ],
)
def test_the_figures_are_the_servers_but_for_three_percent(launch: Launched, flags: tuple[str, ...]) -> None:
    """At moderate load, on a quiet machine: prompts so long that 3 % is more than the way to the server."""
    compare_with_metrics(launch, 1200, 24, *flags, rel=0.03)


def test_logprobs_cost_bytes_that_are_shown(launch: Launched) -> None:
    flags = (*LOAD, "--dataset-name", "random-ids", "--random-range-ratio", "1", "--seed", "6")
    asked = ("--return-logprob", "--top-logprobs-num", "2")
    _, without, _ = bench(*address(launch, "carousel"), *flags)
    code, with_them, printed = bench(*address(launch, "carousel"), *flags, *asked)
    assert code == 0, printed
    assert without["extra_bytes"] == 0
    assert with_them["extra_bytes"] > 6 * 8 * 2 * len("-0.0")
    # How many tokens share a chunk differs from run to run, and a chunk's other bytes with it: totals of two
    # runs say nothing of each other.
    assert with_them["received_bytes"] > with_them["extra_bytes"]
    assert "Logprobs and logits per output token:" in printed
    code, over_zmq, printed = bench(*address(launch, "sdk"), *flags, *asked)
    assert code == 0, printed
    # A float32 for each of 6 x 8 tokens, and a float32 with an int32 for the two likeliest.
    assert over_zmq["extra_bytes"] == 6 * 8 * (4 + 2 * 8)


@pytest.mark.parametrize("stream", [(), ("--disable-stream",)])
def test_logits_cost_their_whole_size(launch: Launched, stream: tuple[str, ...]) -> None:
    lengths = ("--random-input-len", "20", "--random-output-len", "4", "--random-range-ratio", "1")
    code, result, printed = bench(
        *address(launch, "sdk"),
        *("--dataset-name", "random-ids", "--num-prompts", "3", "--disable-tqdm", *lengths, *stream),
        *("--return-context-logits", "--return-generation-logits"),
    )
    assert code == 0, printed
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_bytes())["vocab_size"]
    assert (result["failed"], result["total_input_tokens"]) == (0, 3 * 20)
    assert result["extra_bytes"] == 3 * (20 + 4) * vocab_size * 4


@pytest.mark.parametrize("backend", ["carousel", "sdk"])
def test_with_an_emptied_cache_the_same_seed_finds_nothing_in_it(launch: Launched, backend: str) -> None:
    flags = (*LOAD, "--dataset-name", "random-ids", "--random-range-ratio", "1", "--seed", "7")
    bench(*address(launch, backend), *flags)
    _, again, _ = bench(*address(launch, backend), *flags)
    code, flushed, printed = bench(*address(launch, backend), *flags, "--flush-cache")
    assert code == 0, printed
    assert again["cached_input_tokens"] == 6 * 16
    assert flushed["cached_input_tokens"] == 0


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
