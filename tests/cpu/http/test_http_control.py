"""Questions of operators to the HTTP server: metrics, statistics, settings, cache, ids of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as installed_version
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from carousel.server.tracing.tracing import Tracing
from runtime.wire.format import pack_ids
from runtime.wire.messages import ControlRequest, GenerateRequest, SequenceOutput
from runtime.wire.status_page import ProcessStatus
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import EPOCH, failure, finish, output, spell

INFO = {
    "num_iterations": 12,
    "num_ctx_tokens": 40,
    "num_recomputed_ctx_tokens": 3,
    "num_new_pages": 9,
    "num_reused_pages": 4,
    "num_missed_pages": 5,
    "iter_latency_bounds_s": [0.001, 0.01],
    "iter_latency_counts": [5, 6, 1],
    "iter_latency_sum_s": 0.5,
    "page_size": 16,
    "num_evicted_pages": 3,
    "num_retracted": 2,
    "queue_time_bounds_s": [0.1, 1.0],
    "queue_time_counts": [4, 1, 2],
    "queue_time_sum_s": 7.5,
    "num_drafts": 10,
    "num_draft_tokens": 30,
    "num_accepted_draft_tokens": 15,
    "mask_wait_s": 0.5,
    "num_late_masks": 3,
    "draft_tokens_by_position": [10, 10, 10],
    "accepted_draft_tokens_by_position": [9, 4, 2],
    "max_loras": 4,
    "num_adapters": 3,
    "num_adapters_in_use": 2,
    "adapter_bytes": 1000,
    "num_adapter_hits": 5,
    "num_adapter_misses": 6,
    "num_adapter_loads": 7,
    "num_adapter_failures": 1,
    "num_adapter_evictions": 3,
    "adapter_load_s": 0.25,
    "adapter_requests": {"sql": 8, "chat": 3},
}


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    if request.text == "refuse":
        return [failure(request, "invalid_value", 400, "text")]
    if request.text == "begin":
        return [output(request, "a")]
    if request.text == "end":
        return [output(request, "a", finish=finish("abort"))]
    return spell("abc")(request)


@pytest.fixture
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), answer) as front:
        front.ring.info = INFO
        yield front


def samples(front: Front) -> dict[str, float]:
    """Value by name, without the prefix; of a histogram's buckets, by name and bound."""
    response = front.http.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=")
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            bound = "".join(f" {sample.labels[name]}" for name in ("le", "position") if name in sample.labels)
            values[sample.name.removeprefix("sglang:") + bound] = sample.value
    return values


COUNTERS = (
    "num_requests_total",
    "num_aborted_requests_total",
    "prompt_tokens_total",
    "cached_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
)


def counts(front: Front) -> list[float]:
    values = samples(front)
    return [values[name] for name in COUNTERS]


def test_counts_equal_requests_and_tokens(front: Front) -> None:
    assert counts(front) == [0] * 8
    assert front.complete(prompt=["x", "y"]).status_code == 200
    assert counts(front) == [2, 0, 10, 4, 6, 0, 0, 2]
    assert front.chat(stream=True).status_code == 200
    first, *rest = counts(front)
    assert (first, rest[:4], rest[4:][::2]) == (3, [0, 15, 6, 9], [1, 3])


def test_each_token_of_a_stream_but_the_first_is_one_latency(front: Front) -> None:
    connection = front.open_raw("/v1/completions", prompt="begin", stream=True)
    request = front.ring.wait_request()
    assert connection.recv(65536)  # the head, or more: the first piece has passed
    front.ring.send(output(request, "bcd", finish=finish("stop", 4)))
    data = b""
    while b"[DONE]" not in data:
        data += connection.recv(65536)
    connection.close()
    values = samples(front)
    assert values["time_to_first_token_seconds_count"] == 1
    assert values["inter_token_latency_seconds_count"] == 3
    assert values["inter_token_latency_seconds_sum"] <= values["e2e_request_latency_seconds_sum"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["refuse", "end"])
def test_what_does_not_finish_counts_as_aborted(front: Front, prompt: str, stream: bool) -> None:
    front.complete(prompt=prompt, stream=stream)
    values = samples(front)
    assert (values["num_requests_total"], values["num_aborted_requests_total"]) == (1, 1)
    assert values["e2e_request_latency_seconds_count"] == 0


def test_a_client_that_leaves_counts_as_aborted(front: Front) -> None:
    connection = front.open_raw("/v1/completions", prompt="begin", stream=True)
    assert connection.recv(65536)
    connection.close()
    front.ring.wait_abort()
    values = samples(front)
    assert (values["num_requests_total"], values["num_aborted_requests_total"]) == (1, 1)


def test_a_body_that_is_refused_is_no_request(front: Front) -> None:
    assert front.complete(temperature=-1).status_code == 400
    assert counts(front) == [0] * 8


def show_load(front: Front) -> None:
    load = ProcessStatus(EPOCH, 1, "ready", time.monotonic_ns(), 5, 6, 70, num_free_pages=30, num_pages=40)
    front.ring.status.write("scheduler", load._replace(tokens_per_s=128.0))


def test_gauges_and_queue_times_are_the_schedulers(front: Front) -> None:
    show_load(front)
    values = samples(front)
    assert values["num_running_reqs"] == 5
    assert values["num_queue_reqs"] == 6
    assert values["num_used_tokens"] == 160
    assert values["max_total_num_tokens"] == 640
    assert values["token_usage"] == 0.25
    assert values["gen_throughput"] == 128
    assert values["evicted_tokens_total"] == 48
    assert values["num_retracted_requests_total"] == 2
    assert [values[f"queue_time_seconds_bucket {bound}"] for bound in ("0.1", "1.0", "+Inf")] == [4, 5, 7]
    assert (values["queue_time_seconds_count"], values["queue_time_seconds_sum"]) == (7, 7.5)
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [values[f"spec_decode_{name}_total"] for name in names] == [10, 30, 15]
    by_position = [values[f"spec_decode_num_accepted_tokens_per_pos_total {i}"] for i in range(3)]
    assert by_position == [9, 4, 2]
    assert values["spec_accept_length"] == 2.5


def test_routers_of_other_engines_find_what_they_ask_for(front: Front) -> None:
    show_load(front)
    assert front.http.get("/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 11, "num_waiting_reqs": 6, "num_tokens": 10 * 16 + 70}
    ]
    about = front.http.get("/get_model_info").json()
    assert about == front.http.get("/model_info").json()
    assert (about["is_generation"], about["max_model_len"]) == (True, 64)
    assert front.http.get("/version").json() == {"version": installed_version("carousel")}
    assert front.http.get("/get_server_info").json()["settings"]["page_size"] == 16


def test_the_deep_check_generates(front: Front) -> None:
    assert front.http.get("/health_generate").json() == {"status": "ready"}
    (request,) = front.ring.requests
    assert (request.input_ids, request.sampling.max_tokens) == (pack_ids([0]), 1)
    front.ring.answer = lambda request: [failure(request, "overloaded", 503, retry_after_s=1.0)]
    assert front.http.get("/health_generate").status_code == 200, "a full queue is no illness"
    front.ring.answer = lambda request: [failure(request, "internal", 500)]
    response = front.http.get("/health_generate")
    assert (response.status_code, response.json()["status"]) == (503, "not ready")
    front.ring.set_state("worker", "loading")
    assert front.http.get("/health_generate").json()["role"] == "worker"


@pytest.mark.parametrize("path", ["/metrics", "/server_info", "/stats/iterations", "/snapshot"])
def test_what_needs_the_runtime_says_so_while_there_is_none(front: Front, path: str) -> None:
    front.ring.set_state("launcher", "loading")
    response = front.http.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert front.http.get("/stats").json()["processes"]["launcher"]["state"] == "loading"


@pytest.mark.parametrize("path", ["/metrics", "/server_info", "/stats/iterations", "/snapshot"])
def test_a_runtime_that_does_not_answer_is_a_503(
    front: Front, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carousel.server.server_state.CONTROL_TIMEOUT_S", 0.0)
    response = front.http.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "timeout")


def test_stats_are_those_of_the_status_page(front: Front) -> None:
    show_load(front)
    body = front.http.get("/stats").json()
    processes = body.pop("processes")
    assert processes["scheduler"]["state"] == "ready"
    assert processes["scheduler"]["pid"] == 1
    assert body == {
        "num_running": 5,
        "num_waiting": 6,
        "queued_prompt_tokens": 70,
        "num_pages": 40,
        "num_available_pages": 30,
        "tokens_per_s": 128.0,
        "is_profiling": False,
    }


def test_ten_who_look_are_one_question_in_a_quarter_of_a_second(front: Front) -> None:
    def questions() -> int:
        messages = [message for _, message in front.ring.arrivals]
        return sum(isinstance(each, ControlRequest) and each.op == "snapshot" for each in messages)

    assert front.complete().status_code == 200
    assert questions() == 0, "nobody has looked"
    front.ring.info = {"num_running": 3}
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: front.http.get("/snapshot").json(), range(10)))
    assert answers == [{"op": "snapshot", "num_running": 3}] * 10
    assert 1 <= questions() <= 4


def test_a_timeline_is_found_by_the_request_id(front: Front) -> None:
    front.ring.sampled = {"mine/1"}
    assert front.http.get("/timelines/mine/1").json() == [{"label": "mine/1", "lane": 0}]
    response = front.http.get("/timelines/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "timeline_not_found")
    assert front.http.get("/timelines/" + "x" * 257).status_code == 400


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_sampled_as_its_caller_says(
    front: Front, flags: str, is_sampled: bool, stream: bool
) -> None:
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-{flags}"}
    front.http.post("/v1/completions", json={"prompt": ["x", "y"], "stream": stream}, headers=headers)
    traces = [request.trace for request in front.ring.requests]
    assert len(traces) == 2
    for trace in traces:
        assert (trace is not None) == is_sampled
        assert trace is None or trace.context.hex() == "a" * 32 + "b" * 16 + "01"


def test_server_info_has_only_the_host_of_a_collector(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its URL may hold credentials, in any of its other parts. Without keys everybody reads the settings."""
    monkeypatch.setattr("carousel.server.main.make_tracing", lambda *_: Tracing())
    url = "https://user:pass@collector.example:4318/token/v1/traces?key=abc#def"
    with http_front(tmp_path_factory.mktemp("run"), otlp_traces_endpoint=url) as front:
        shown = front.http.get("/server_info").json()["settings"]["otlp_traces_endpoint"]
    assert shown == "https://collector.example:4318"


def test_server_info_has_the_settings_but_not_the_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    with http_front(tmp_path_factory.mktemp("run"), api_key="secret") as front:
        response = front.http.get("/server_info", headers={"Authorization": "Bearer secret"})
        body = response.json()
        assert body["op"] == "server_info"
        assert body["settings"]["served_model_name"] == "fake"
        assert "api_key" not in body["settings"]
        assert "secret" not in response.text


COMMANDS = ["/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"]


@pytest.mark.parametrize("path", COMMANDS)
def test_commands_are_posted_with_or_without_a_body(front: Front, path: str) -> None:
    empty = {"headers": {"Content-Type": "application/json"}}
    bodies: list[dict[str, Any]] = [{}, {"json": {}}, empty]
    for body in bodies:
        assert front.http.post(path, **body).json()["op"] == path[1:]
    assert front.http.get(path).status_code == 405


@pytest.mark.parametrize("path", COMMANDS)
def test_a_page_of_another_origin_can_command_nothing(front: Front, path: str) -> None:
    assert front.http.post(path, headers={"Origin": "https://elsewhere"}).status_code == 403
    assert front.http.post(path, data={"mode": "abort"}).status_code == 415


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause_generation", {"mode": "now"}, "mode"),
        ("/start_profile", {"num_steps": 0}, "num_steps"),
        ("/start_profile", {"num_steps": 10_001}, "num_steps"),
        ("/start_profile", {"output_dir": "/tmp"}, "output_dir"),
        ("/stop_profile", {"num_steps": 1}, "num_steps"),
    ],
)
def test_what_a_command_does_not_know_is_refused_by_name(
    front: Front, path: str, body: dict[str, Any], param: str
) -> None:
    response = front.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_ready_says_how_much_of_the_weights_is_there(front: Front) -> None:
    front.ring.set_state("worker", "loading", loaded=0.25)
    response = front.http.get("/ready")
    expected = {"status": "not ready", "role": "worker", "reason": "loading", "loaded": 0.25}
    assert (response.status_code, response.json()) == (503, expected)
    front.ring.set_state("worker", "ready", loaded=1.0)
    assert front.http.get("/ready").json() == {"status": "ready"}
    front.ring.set_state("tokenizer", "loading")
    assert "loaded" not in front.http.get("/ready").json()


def test_a_paused_runtime_is_not_ready(front: Front) -> None:
    front.ring.status.write(
        "scheduler", ProcessStatus(EPOCH, 1, "ready", time.monotonic_ns(), is_paused=True)
    )
    response = front.http.get("/ready")
    assert response.status_code == 503
    assert response.json() == {
        "status": "not ready",
        "role": "scheduler",
        "reason": "generation is paused",
    }


@pytest.mark.parametrize(("is_open", "status"), [(False, 401), (True, 200)])
def test_metrics_need_the_key_unless_they_are_open(
    tmp_path_factory: pytest.TempPathFactory, is_open: bool, status: int
) -> None:
    with http_front(tmp_path_factory.mktemp("run"), api_key="secret", metrics_open=is_open) as front:
        front.ring.info = INFO
        assert front.http.get("/metrics").status_code == status
        for path in ("/stats", "/server_info", "/snapshot", "/flush_cache"):
            assert front.http.get(path).status_code == 401


# -- ids of requests ---------------------------------------------------------------------------------------


def test_the_senders_id_comes_back_and_is_the_label(front: Front) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        response = front.http.post(path, json=body, headers={"X-Request-Id": "mine"})
        assert response.headers.get_list("x-request-id") == ["mine"]
        assert front.ring.requests[-1].label == "mine"


def test_a_request_without_an_id_gets_one_of_its_own(front: Front) -> None:
    ids = set()
    for _ in range(2):
        response: httpx.Response = front.complete()
        assert front.ring.requests[-1].label == response.headers["x-request-id"]
        ids.add(response.headers["x-request-id"])
    assert len(ids) == 2


def test_errors_carry_the_id(front: Front) -> None:
    for response in (
        front.http.get("/nowhere", headers={"X-Request-Id": "mine"}),
        front.http.post("/v1/completions", json={}, headers={"X-Request-Id": "mine"}),
    ):
        assert response.status_code in (400, 404)
        assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("headers", [[""], ["x" * 257], ["a b"], ["\u00e9"], ["a", "b"]])
def test_an_id_that_can_be_none_is_refused_by_name(front: Front, headers: list[str]) -> None:
    fields: Any = [("X-Request-Id", value.encode("latin-1")) for value in headers]
    response = front.http.post("/v1/completions", json={"prompt": "x"}, headers=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Id"
    assert not front.ring.requests
