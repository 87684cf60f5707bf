"""A real Prometheus over a run with four API processes, one of which dies: what it holds is what happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from carousel.server.admin.metric_names import ALIASES, SGLANG, VLLM
from tests.harness.ring.launched import Launched, launched, wait_until
from tests.metrics.conftest import DEPLOY, RULES, Prometheus, prometheus, tool

FLAGS = (
    *("--api-workers", "4", "--metrics-names", "vllm", "--max-running-requests", "8"),
    *("--dtype", "float32", "--cpu-threads", "1", "--speculative-algorithm", "NGRAM"),
)
PROMPT = "import os\n\n\ndef main(" * 4
COMPARISON = re.compile(r"^(?P<expression>.*)\s(?:<|>|==|!=|<=|>=)\s*[0-9.]+\s*$", re.DOTALL)


class Run(NamedTuple):
    launch: Launched
    prometheus: Prometheus
    sent: Counter[str]
    """Sequences by how they have ended, and tokens, as their callers count them."""


def ask(url: str, sent: Counter[str], number: int) -> None:
    """One request, on a connection of its own: any of the API processes may get it."""
    n, is_stream = 1 + number % 2, number % 3 == 0
    body: dict[str, Any] = {"prompt": f"{number % 5}{PROMPT}", "n": n, "ignore_eos": True, "max_tokens": 6}
    if number % 7 == 0:  # refused
        body["temperature"] = -1.0
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.Client(base_url=url, timeout=120) as http:
        answer = http.post("/v1/completions", json=body)
    if answer.status_code != 200:
        assert answer.status_code == 400, answer.text
        sent["refused"] += n
        return
    if is_stream:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        usage = next(event for event in map(json.loads, reversed(events)) if event.get("usage"))["usage"]
    else:
        usage = answer.json()["usage"]
    sent["length"] += n
    sent["prompt_tokens"] += usage["prompt_tokens"]
    sent["generation_tokens"] += usage["completion_tokens"]


def leave(url: str, sent: Counter[str]) -> None:
    """Begin a stream and go."""
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 400, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        next(answer.iter_lines())
    sent["abort"] += 1


def replace_one(launch: Launched) -> None:
    """Kill an API process, and wait for the one in its place."""
    pid = launch.pid_of("api", 2)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: launch.pid_of("api", 2) != pid, 20.0, "a new API process")
    wait_until(lambda: httpx.get(f"{launch.url}/ready").status_code == 200, 30.0, "ready again")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    sent: Counter[str] = Counter()
    with launched(*FLAGS) as launch:
        target = launch.url.removeprefix("http://")
        with prometheus(target, tmp_path_factory.mktemp("prometheus")) as server:
            server.wait_scrapes(1)
            for half in range(2):
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(partial(ask, launch.url, sent), range(24 * half, 24 * half + 24)))
                leave(launch.url, sent)
                server.wait_scrapes(2)
                if half == 0:
                    replace_one(launch)
            server.wait_scrapes(2)
            server.stay()
            yield Run(launch, server, sent)


def test_counts_equal_what_was_sent(run: Run) -> None:
    server, sent = run.prometheus, run.sent
    ended = {
        series["metric"]["finish_reason"]: float(series["value"][1])
        for series in server.query("carousel:finished_sequences_total")
    }
    assert sent["refused"] > 5
    assert ended == {
        "stop": 0,
        "length": sent["length"],
        "timeout": 0,
        "abort": sent["abort"],
        "error": 0,
    }
    assert server.value("sglang:num_requests_total") == sent["length"] + sent["abort"]
    assert server.value("sglang:num_aborted_requests_total") == sent["abort"] == 2
    for name in ("prompt_tokens", "generation_tokens"):
        assert server.value(f"sglang:{name}_total") == sent[name] > 0
    assert server.value("sglang:e2e_request_latency_seconds_count") == sent["length"]
    assert server.value("sglang:queue_time_seconds_count") == sent["length"] + sent["abort"]
    assert server.value('vllm:request_success_total{finished_reason="length"}') == sent["length"]


def test_no_counter_falls_although_a_process_was_replaced(run: Run) -> None:
    assert run.prometheus.value("carousel:restarts_total") == 1
    num_series = num_samples = 0
    for series in run.prometheus.history('{__name__=~"(sglang|vllm|carousel):.+_(total|count|bucket|sum)"}'):
        values = [float(value) for _, value in series["values"]]
        assert values == sorted(values), series["metric"]
        num_series += 1
        num_samples += len(values)
    assert num_series > 100
    assert num_samples / num_series > 5  # the run waits for seven scrapes, and some series begin later


def expressions_of_the_dashboard() -> Iterator[str]:
    board = json.loads((DEPLOY / "grafana" / "carousel.json").read_text())
    variables = {each["name"] for each in board["templating"]["list"]}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            used = set(re.findall(r"\$(\w+)", expression)) - {"__rate_interval"}
            assert used <= variables
            yield expression.replace("$__rate_interval", "1h").replace("$model", ".*")


def test_every_expression_of_the_dashboard_gives_data(run: Run) -> None:
    expressions = list(expressions_of_the_dashboard())
    assert len(expressions) > 30
    empty = [each for each in expressions if not run.prometheus.query(each)]
    assert not empty
    nan = [each for each in expressions if run.prometheus.query(each)[0]["value"][1] == "NaN"]
    assert not nan


def test_panels_do_not_lie_on_one_another() -> None:
    board = json.loads((DEPLOY / "grafana" / "carousel.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    cells: Counter[tuple[int, int]] = Counter()
    for panel in board["panels"]:
        place = panel["gridPos"]
        rows, columns = range(place["y"], place["y"] + place["h"]), range(place["x"], place["x"] + place["w"])
        cells.update((row, column) for row in rows for column in columns)
    assert set(cells.values()) == {1}
    assert max(column for _, column in cells) == 23


def test_every_expression_of_the_rules_gives_data_and_none_is_in_error(run: Run) -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        found = COMPARISON.match(rule["expr"])
        assert found, rule["alert"]
        expression = re.sub(r"\[\d+m\]", "[1h]", found["expression"])
        assert run.prometheus.query(expression), rule["alert"]
    loaded = run.prometheus.rules()
    assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in rules]
    assert {rule["health"] for rule in loaded} == {"ok"}


def test_promtool_passes() -> None:
    folder = DEPLOY / "prometheus"
    for arguments in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ):
        done = subprocess.run([tool("promtool"), *arguments], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested() -> None:
    alerts = {
        rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    }
    text = (DEPLOY / "prometheus" / "alerts_test.yml").read_text()
    assert set(re.findall(r'alertname="(\w+)"', text)) == alerts


def test_promtool_finds_nothing_in_the_metrics_but_the_colons_of_the_names(run: Run) -> None:
    """SGLang's and vLLM's names have a colon, which the linter would keep for rules."""
    text = httpx.get(f"{run.launch.url}/metrics").text
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    lines = [
        line for line in (done.stdout + done.stderr).splitlines() if "should not contain ':'" not in line
    ]
    # Names of theirs, given as they are.
    kept = {"sglang:gen_throughput", "sglang:max_total_num_tokens", "vllm:kv_cache_usage_perc"}
    assert [line for line in lines if line.split(" ")[0] not in kept] == []


def test_what_the_table_calls_the_same_is_there(run: Run) -> None:
    names = set(run.prometheus.http.get("/api/v1/label/__name__/values").json()["data"])
    stems = {re.sub(r"_(total|count|sum|bucket)$", "", name) for name in names}
    for prefix, metrics in (("vllm:", ALIASES), ("sglang:", SGLANG)):
        for metric in metrics:
            if metric.how == "same" and "adapters" not in metric.note:
                assert prefix + metric.name in stems, metric.name
    for metric in (*VLLM, *SGLANG):
        if metric.how == "near":
            assert metric.ours in stems, metric.ours
    absent = {f"vllm:{metric.name}" for metric in VLLM if metric.how != "same"}
    assert not absent & stems
