"""Pause and profile of a whole launch: over HTTP and with the client library."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from carousel.client.async_ import AsyncClient
from carousel.client.sync import Client
from runtime.base.errors import InvalidRequest, RequestError
from runtime.ring.endpoints import Endpoints
from runtime.ring.tenants import Tenant, TenantLimits, Tenants, TenantsFile
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.launched import Launched, launched, wait_until

GREEDY = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def launch(profiles: Path) -> Iterator[Launched]:
    with launched("--port", "0", "--max-running-requests", "4", "--profile-dir", str(profiles)) as launch:
        yield launch


def test_a_paused_launch_is_not_ready_and_goes_on_where_it_was(launch: Launched) -> None:
    with Client(launch.run_dir) as client, httpx.Client(base_url=launch.url, timeout=60) as http:
        expected = client.generate("def f(x):", GREEDY, timeout=60).text
        stream = client.stream("def f(x):", GREEDY, timeout=60)
        next(stream)
        assert http.post("/pause_generation").json()["is_paused"] is True
        wait_until(lambda: http.get("/ready").status_code == 503, 10.0, "the pause is seen")
        assert http.get("/ready").json()["reason"] == "generation is paused"
        later = client.stream("def f(x):", GREEDY, timeout=60)
        wait_until(lambda: client.server_info()["num_waiting"] == 1, 10.0, "the new one waits")
        assert client.server_info()["is_paused"] is True
        assert client.pause_generation("retract")["num_running"] == 0
        assert client.flush_cache()["num_pages_in_use"] == 0
        assert client.continue_generation() == {"is_paused": False, "num_running": 0, "num_waiting": 2}
        for each in (stream, later):
            for _ in each:
                pass
            assert each.state.completion().text == expected
        wait_until(lambda: http.get("/ready").status_code == 200, 10.0, "the end of the pause is seen")
        assert "Generation is paused (in_place), #running-req: 1" in launch.log()


def test_a_new_table_of_tenants_is_in_force_without_a_restart(launch: Launched) -> None:
    with Client(launch.run_dir) as client:
        client.generate("def f(x):", SamplingParams(max_tokens=4, temperature=0.0), timeout=60)
        assert client.server_info()["tenants"][""]["num_tokens"] > 4
        limits = TenantLimits(max_running=1)
        file = TenantsFile(Endpoints(launch.run_dir).tenants_file)
        file.write(Tenants((Tenant("alice", "user", limits), Tenant("bob"))))
        wait_until(lambda: "alice" in client.server_info()["tenants"], 10.0, "the new table")
        assert "The limits of 2 tenants are in force" in launch.log()
        file.write(Tenants())


def test_a_profile_shows_what_scheduler_and_worker_did(launch: Launched, profiles: Path) -> None:
    async def profile() -> dict[str, object]:
        async with AsyncClient(launch.run_dir) as client:
            begun = await client.start_profile(8)
            with pytest.raises(RequestError, match="is being taken"):
                await client.start_profile()
            await client.generate("def f(x):", GREEDY, timeout=60)
            with pytest.raises(RequestError, match="no profile"):
                await client.stop_profile()
            return begun

    begun = asyncio.run(profile())
    events = json.loads((profiles / str(begun["file"])).read_bytes())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [(names[event["pid"]], event["name"]) for event in events if event["ph"] == "X"]
    for name in ("forward", "sample", "copy"):
        assert spans.count(("worker", name)) == 8
    assert spans.count(("scheduler", "launch")) >= 8
    # One clock: a step is computed after its launch has begun and before its commit has ended.
    begins = {e["args"]["step"]: e["ts"] for e in events if e["name"] == "launch"}
    ends = {e["args"]["step"]: e["ts"] + e["dur"] for e in events if e["name"] == "commit"}
    forwards = [event for event in events if event["name"] == "forward"]
    for event in forwards:
        step = event["args"]["step"]
        assert begins[step] <= event["ts"] <= event["ts"] + event["dur"] <= ends[step]


def test_a_profile_over_http_goes_where_the_launch_says(launch: Launched, profiles: Path) -> None:
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        begun = http.post("/start_profile").json()
        assert http.post("/start_profile").status_code == 409
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).raise_for_status()
        ended = http.post("/stop_profile").json()
        assert ended["file"] == begun["file"]
        assert ended["num_steps"] >= 3
        assert http.post("/stop_profile").status_code == 409
        own = json.loads((profiles / ended["file"]).read_bytes())["traceEvents"]
        served = http.get(f"/profiles/{ended['file']}").json()
        assert own
        assert served["traceEvents"][-len(own) :] == own
        assert {each["args"]["name"] for each in served["traceEvents"] if each["name"] == "process_name"} == {
            *("HTTP", "tokenizer", "scheduler", "worker", "detokenizer")
        }


def test_a_sampled_request_is_shown_while_it_runs_and_leaves_a_timeline(launch: Launched) -> None:
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "X-Request-Id": "sampled/1"}
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        body = {"prompt": "def f(x):", "max_tokens": 200, "n": 2, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = response.iter_lines()
            next(lines)
            shown = http.get("/snapshot").json()
            for _ in lines:
                pass
        assert shown["num_running"] == len(shown["rows"]["row"]) > 0
        assert set(shown["rows"]["max_tokens"]) == {shown["rows"]["num_prompt"][0] + 200}
        found = http.get("/timelines/sampled/1").json()
        assert sorted(each["index"] for each in found) == [0, 1]
        for each in found:
            names = [name for name, _, _ in each["stamps"]]
            assert each["trace_id"] == "a" * 32
            assert names[:4] == ["tokenizer_in", "tokenizer_out", "scheduler", "row"]
            assert names[-4:] == ["first_token", "last_token", "closed", "detokenizer"]
            times = [seconds for _, seconds, _ in each["stamps"]]
            assert times == sorted(times)
            assert each["completion_tokens"] == 200
            assert abs(time.time() - each["started_s"]) < 60
        plain = {"X-Request-Id": "plain"}
        http.post("/v1/completions", json={"prompt": "x"}, headers=plain).raise_for_status()
        assert http.get("/timelines/plain").status_code == 404


def test_the_kernel_takes_the_engine_first_and_the_launcher_last_when_memory_is_short(
    launch: Launched,
) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    state = json.loads((launch.run_dir / "state.json").read_bytes())
    scores = {child["role"]: score(child["pid"]) for child in state["children"]}
    inherited = score(os.getpid())
    assert score(launch.process.pid) == score(state["guardian_pid"]) == inherited
    assert scores == {
        "worker": min(1000, inherited + 300),
        "scheduler": min(1000, inherited + 300),
        "detokenizer": min(1000, inherited + 100),
        "tokenizer": min(1000, inherited + 100),
        "api": min(1000, inherited + 100),
        "grammar": min(1000, inherited + 100),
    }


def test_arguments_are_checked_before_anything_is_sent(launch: Launched) -> None:
    with Client(launch.run_dir) as client:
        with pytest.raises(InvalidRequest, match="mode: one of in_place, retract, abort"):
            client.pause_generation("later")  # type: ignore[arg-type]
        for wrong in (0, -1, 10_001, True, 1.5):
            with pytest.raises(InvalidRequest, match="num_steps: 1 to 10000"):
                client.start_profile(wrong)  # type: ignore[arg-type]


def test_in_a_profile_each_request_passes_the_processes_in_order(launch: Launched) -> None:
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        begun = http.post("/start_profile").json()
        assert http.get(f"/profiles/{begun['file']}").json()["error"]["code"] == "profile_not_found"
        after = http.get("/stats/iterations").json()[-1]["iter"]
        with ThreadPoolExecutor(8) as pool:

            def ask(number: int) -> None:
                body = {
                    "prompt": f"# {number}\n" * 9,
                    "max_tokens": 12,
                    "ignore_eos": True,
                    "n": 1 + number % 2,
                }
                body["stream"] = number % 3 == 0
                headers = {"X-Request-Id": f"profiled-{number}"}
                http.post("/v1/completions", json=body, headers=headers).raise_for_status()

            list(pool.map(ask, range(12)))
        ended = http.post("/stop_profile").json()
        steps = http.get(f"/stats/iterations?after={after}").json()
        answer = http.get(f"/profiles/{ended['file']}")
        assert "attachment" in answer.headers["content-disposition"]
        events = answer.json()["traceEvents"]
        for wrong in ("state.json", "../state.json", "profile-1.json", "profile-20200101-000000-1.json"):
            assert http.get(f"/profiles/{wrong}").status_code == 404
    check_nesting(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    by_arrow: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            by_arrow.setdefault(event["id"], []).append(event)
    assert len(by_arrow) == 18, "an arrow for each sequence"
    slices = [event for event in events if event["ph"] == "X"]
    through = set()
    for arrow in by_arrow.values():
        assert [event["ph"] for event in arrow] == ["s", "t", "t", "t", "f"]
        assert [names[event["pid"]] for event in arrow] == [
            "HTTP",
            "tokenizer",
            "scheduler",
            "detokenizer",
            "HTTP",
        ]
        times = [event["ts"] for event in arrow]
        assert times == sorted(times)
        own = [
            {
                e["name"]
                for e in slices
                if e["tid"] == point["tid"] and e["ts"] <= point["ts"] <= e["ts"] + e["dur"]
            }
            for point in arrow
        ]
        (name,) = own[0] & own[1] & own[2] & own[3] & own[4]
        through.add(name)
    assert through == {f"profiled-{number}" for number in range(12)}
    recorded = {event["args"]["step"]: event["dur"] / 1e3 for event in slices if event["name"] == "step"}
    told = {each["iter"]: each["iterLatencyMS"] for each in steps if each["iter"] in recorded}
    assert len(told) == len(recorded) == ended["num_steps"]
    assert sum(recorded.values()) == pytest.approx(sum(told.values()), rel=0.01)
    of_worker_ms = sum(e["dur"] for e in slices if e["name"] in ("forward", "sample", "copy")) / 1e3
    assert 0 < of_worker_ms < 1.01 * sum(told.values()), "the worker works within the steps"


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of one track lie within or behind one another."""
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault(event["tid"], []).append((event["ts"], -event["dur"]))
    assert len(tracks) >= 6
    for track, slices in tracks.items():
        open_until: list[float] = []
        for begin, minus in sorted(slices):
            while open_until and open_until[-1] <= begin + 0.01:
                open_until.pop()
            assert not open_until or begin - minus <= open_until[-1] + 0.01, track
            open_until.append(begin - minus)
