"""The command: what it accepts and refuses, what it prints and writes, and its exit code."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench_serving.arguments import parse_args
from bench_serving.main import bench, main
from carousel.http_client import RequestFailure
from runtime.base.errors import EXIT_CONFIG, ConfigError
from tests.harness.http.scripted_server import HEAD, Step, end, plain, scripted_server, text_chunk

SMALL = ("--backend", "openai", "--random-input-len", "6", "--random-output-len", "2", "--disable-tqdm")
LABELS = (
    "Backend:",
    "Traffic request rate:",
    "Max request concurrency:",
    "Successful requests:",
    "Failed requests:",
    "Benchmark duration (s):",
    "Total input tokens:",
    "Total generated tokens:",
    "Request throughput (req/s):",
    "Input token throughput (tok/s):",
    "Output token throughput (tok/s):",
    "Peak output token throughput (tok/s):",
    "Peak concurrent requests:",
    "Total token throughput (tok/s):",
    "Concurrency:",
    *(f"{part} E2E Latency (ms):" for part in ("Mean", "Median", "P90", "P99")),
    *(f"{part} {name} (ms):" for name in ("TTFT", "TPOT") for part in ("Mean", "Median", "P99")),
    *(f"{part} ITL (ms):" for part in ("Mean", "Median", "P95", "P99", "Max")),
)


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = parse_args(["--output-file=~/runs.jsonl", "--plot=~x/no-such-user", "--tokenizer", "~"])
    assert config.output_file == "/home/somebody/runs.jsonl"
    assert (config.plot, config.tokenizer) == ("~x/no-such-user", "/home/somebody")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--backend nobody", "--backend: 'nobody' is none of carousel"),
        ("--dataset-name gsm8k", "--dataset-name: 'gsm8k' is none of"),
        ("--num-prompts -1", "--num-prompts: Expected `int` >= 0"),
        ("--num-prompts ten", "--num-prompts: Expected `int`"),
        ("--request-rate 0", "--request-rate: Expected `float` > 0"),
        ("--random-range-ratio 1.5", "--random-range-ratio"),
        ("--port 70000", "--port"),
        ("--no-such-flag", "--no-such-flag"),
        ("--num-prompt 3", "unknown option --num-prompt; did you mean --num-prompts?"),
        ("--tag=x", "unknown option --tag; --help lists those there are"),
        ("--gsp-num-groups 2", "--gsp-num-groups: only for --dataset-name generated-shared-prefix"),
        ("--dataset-name custom", "--dataset-path"),
        ("--dataset-name custom --dataset-path x --random-input-len 3", "--random-input-len: only for"),
        ("--num-turns 3", "--num-turns: only for --dataset-name multi-turn"),
        ("--dataset-name random-ids --backend openai-chat", "takes no token ids"),
        ("--dataset-name random-ids --apply-chat-template", "--apply-chat-template"),
        ("--backend openai-chat --apply-chat-template", "--apply-chat-template"),
        ("--backend sdk --port 1", "--port: the sdk backend"),
        ("--backend sdk --model x", "--model: the sdk backend"),
        ("--run-dir x", "--run-dir: only the sdk backend"),
        ("--return-context-logits", "--return-context-logits: only the sdk backend"),
        ("--backend vllm --return-generation-logits", "--return-generation-logits: only the sdk backend"),
        ("--backend sdk --check-metrics", "--check-metrics: the sdk backend"),
        ("--top-logprobs-num 3", "--top-logprobs-num: only with --return-logprob"),
        ("--return-logprob --top-logprobs-num 21", "--top-logprobs-num: Expected `int` <= 20"),
        ("--burstiness 0.5", "--burstiness: needs a finite --request-rate"),
        ("--sweep inf --burstiness 0.5", "--burstiness: needs a finite --request-rate"),
        ("--request-rate 2 --burstiness 0", "--burstiness: Expected `float` > 0"),
        ("--backend carousel-chat --dataset-name random-ids", "takes no token ids"),
        ("--base-url http://x --port 1", "--port: --base-url is given already"),
        ("--sweep 1,2 --request-rate 3", "--request-rate: --sweep is given already"),
        ("--sweep 1,x", "--sweep"),
        ("--sweep 1,0", "--sweep"),
        ("--header novalue", "--header"),
        ("--goodput ttft", "--goodput: 'ttft' is not one of"),
        ("--goodput fast:3", "--goodput"),
        ("--goodput ttft:-3", "--goodput"),
        ("--goodput ttft:3 --disable-stream", "--goodput"),
        ("--extra-request-body [1]", "--extra-request-body"),
        ('--extra-request-body {"n":2}', "--extra-request-body: one sequence per request"),
        (
            '--extra-request-body {"sampling_params":{"n":2}}',
            "--extra-request-body: one sequence per request",
        ),
        ('--extra-request-body {"stream":false}', "--extra-request-body: stream"),
        ("--output-details", "--output-details: name the file"),
    ],
)
def test_what_would_have_no_effect_or_no_meaning_is_refused_by_name(flags: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(flags.split())
    assert says in str(caught.value)


def test_flags_become_what_they_mean() -> None:
    config = parse_args(
        [
            *("--backend", "vllm", "--sweep", "1,2.5,inf", "--header", "A=b=c"),
            *("--goodput", "ttft:200", "e2el:5e3"),
        ]
    )
    assert config.rates == [1.0, 2.5, float("inf")]
    assert config.slo_ms == {"ttft": 200.0, "e2el": 5000.0}
    assert config.headers == {"A": "b=c"}
    assert (config.server_url, config.speaks) == ("http://127.0.0.1:8000", "completions")
    assert parse_args([]).rates == [float("inf")]


def test_wrong_arguments_end_with_code_64_and_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend", "nobody"]) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith("error: --backend")


def test_a_server_that_is_not_there_ends_with_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def run(
    *flags: str, fail_after: int | None = None, metrics: Callable[[int], bytes] | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """(exit code, request bodies) against a server that refuses all but the first `fail_after` requests."""
    num_asked = 0

    def script(body: dict[str, Any]) -> list[Step]:
        nonlocal num_asked
        num_asked += 1
        if fail_after is not None and num_asked > fail_after:
            return [(0.0, plain(503, b"full"))]
        return [(0.0, HEAD + text_chunk("a ")), (0.0, text_chunk("b", "length") + end(9, 2))]

    async def both() -> tuple[int, list[dict[str, Any]]]:
        async with scripted_server(script, waits=False, metrics=metrics) as server:
            return await bench(parse_args([*SMALL, "--port", str(server.port), *flags])), server.bodies

    return asyncio.run(both())


def test_a_run_prints_the_usual_table_and_ends_in_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, bodies = run("--num-prompts", "3", "--header", "Authorization=Bearer secret")
    out = capsys.readouterr().out
    assert code == 0
    assert len(bodies) == 4
    lines = out.splitlines()
    assert " Serving Benchmark Result ".center(50, "=") in lines
    for label in LABELS:
        assert any(line.startswith(f"{label:<40} ") for line in lines), label
    result = json.loads(lines[-1])
    assert (result["completed"], result["failed"], result["total_input_tokens"]) == (3, 0, 27)
    assert (result["total_output_tokens"], result["request_rate"]) == (6, "inf")
    assert {"mean_ttft_ms", "p99_itl_ms", "median_e2e_latency_ms", "p90_tpot_ms"} <= result.keys()
    assert result["args"]["num_prompts"] == 3
    assert "secret" not in out


def test_a_failed_request_is_counted_shown_and_makes_the_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _ = run("--num-prompts", "5", "--max-concurrency", "1", fail_after=3)
    out = capsys.readouterr().out
    assert code == 1
    assert "failed 3x: HTTP 503: full" in out
    result = json.loads(out.splitlines()[-1])
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 3, 4)


def test_a_failed_warm_up_ends_the_run_before_it_begins() -> None:
    with pytest.raises(RequestFailure, match=r"the warm-up failed: HTTP 503"):
        run("--num-prompts", "5", fail_after=0)


def test_results_are_appended_with_details_on_request(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run("--num-prompts", "2", "--output-file", str(path))
    run("--num-prompts", "2", "--output-file", str(path), "--output-details")
    plain_line, detailed = map(json.loads, path.read_text().splitlines())
    assert detailed["generated_texts"] == ["a b", "a b"]
    assert detailed["input_lens"] == [9, 9]
    assert [len(itls) for itls in detailed["itls"]] == [1, 1]
    assert detailed["errors"] == ["", ""]
    assert "generated_texts" not in plain_line


def test_a_sweep_has_a_line_and_a_json_object_for_each_rate_and_fresh_prompts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, bodies = run("--num-prompts", "2", "--sweep", "1000,inf", "--warmup-requests", "0")
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    results = [json.loads(line) for line in lines[-2:]]
    assert [result["request_rate"] for result in results] == [1000.0, "inf"]
    curve = lines[next(index for index, line in enumerate(lines) if "Saturation Curve" in line) :]
    assert [line.split()[0] for line in curve[2:4]] == ["1000.0", "inf"]
    assert len({body["prompt"] for body in bodies}) == 4


def metrics_of(num_output: int) -> Callable[[int], bytes]:
    """/metrics of a server that counts 9 input and `num_output` generated tokens in each request."""

    def text(num_requests: int) -> bytes:
        return (
            f"sglang:prompt_tokens_total {9 * num_requests}\n"
            f"sglang:generation_tokens_total {num_output * num_requests}\n"
            f"sglang:e2e_request_latency_seconds_count {num_requests}\n"
            f"sglang:e2e_request_latency_seconds_sum {0.001 * num_requests}\n"
        ).encode()

    return text


def test_the_servers_metrics_are_shown_beside_the_clients_figures_warm_up_excluded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--num-prompts", "3", "--warmup-requests", "2")
    code, _ = run(*flags, metrics=metrics_of(2))
    out = capsys.readouterr().out
    assert code == 0
    assert "Input tokens                                 27           27       +0.00%\n" in out
    assert json.loads(out.splitlines()[-1])["server_metrics"]["output_tokens"] == 6


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--check-metrics",), 1)])
def test_only_a_check_turns_a_difference_into_a_failure(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: int
) -> None:
    assert run("--num-prompts", "3", *flags, metrics=metrics_of(3))[0] == code
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Generated tokens")]
    assert line.split()[2:] == ["6", "9", "-33.33%", "differs"]


def test_a_server_without_metrics_is_measured_unless_a_check_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--num-prompts", "2")[0] == 0
    out = capsys.readouterr().out
    assert "/metrics" not in out
    assert json.loads(out.splitlines()[-1])["server_metrics"] is None
    with pytest.raises(RequestFailure, match="--check-metrics: HTTP 404"):
        run("--num-prompts", "2", "--check-metrics")


def test_what_logprobs_cost_is_in_the_table_when_they_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, bodies = run("--num-prompts", "2", "--return-logprob", "--top-logprobs-num", "2")
    assert {body["logprobs"] for body in bodies} == {2}
    assert "Logprobs and logits (bytes):             0 " in capsys.readouterr().out
    _, bodies = run("--num-prompts", "2")
    assert "logprobs" not in bodies[0]
    assert "Logprobs" not in capsys.readouterr().out


def test_the_cache_is_emptied_after_the_warm_up_and_before_each_run() -> None:
    _, bodies = run("--num-prompts", "1", "--sweep", "1000,inf", "--flush-cache")
    assert ["prompt" in body for body in bodies] == [True, False, True, False, True]


@pytest.mark.parametrize("flags", [(), ("--sweep", "1000,inf")])
def test_a_plot_is_a_png(tmp_path: Path, flags: tuple[str, ...]) -> None:
    path = tmp_path / "plot.png"
    run("--num-prompts", "2", "--plot", str(path), *flags)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plotting_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--plot", "x.png"]) == EXIT_CONFIG
    assert "carousel[bench]" in capsys.readouterr().err
    assert not Path("x.png").exists()


def test_a_file_that_cannot_be_written_is_known_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(Path(__file__).parent / "nowhere/results.jsonl")
    assert main(["--output-file", nowhere]) == EXIT_CONFIG
    assert f"--output-file: {nowhere}" in capsys.readouterr().err
