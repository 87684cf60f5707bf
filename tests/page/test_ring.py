"""The ring: what it shows is what the server says, and it asks only while somebody looks."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from playwright.sync_api import Page, expect

from tests.harness.ring.launched import ROOT, START_S, Launched, wait_until
from tests.page.conftest import Visitor

NUM_STREAMS = 64
CANARY = "xylophonquagga"


@contextmanager
def streams(url: str) -> Iterator[None]:
    """So many answers that come while the block runs."""
    over = threading.Event()

    def read(index: int) -> None:
        body = {
            "prompt": f"# file {index}\nimport os\n" * 4,
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for _ in answer.iter_lines():
                if over.is_set():
                    return

    threads = [threading.Thread(target=read, args=(index,)) for index in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        httpx.post(f"{url}/continue_generation")
        for thread in threads:
            thread.join()


def figure(page: Page, name: str) -> int:
    return int(page.locator(f"[data-figure={name}]").inner_text().replace(",", ""))


def test_during_64_streams_it_agrees_with_the_server(visit: Callable[..., Visitor], launch: Launched) -> None:
    page = visit().open(f"{launch.url}/#ring")
    with streams(launch.url):
        wait_until(
            lambda: httpx.get(f"{launch.url}/stats").json()["num_waiting"] == NUM_STREAMS - 32,
            10.0,
            "a queue",
        )
        expect(page.locator("[data-figure=waiting]")).to_have_text(str(NUM_STREAMS - 32))
        # Nothing moves while generation is paused, so that all can be compared.
        assert httpx.post(f"{launch.url}/pause_generation").status_code == 200
        expect(page.locator(".figures")).to_contain_text("paused")
        page.wait_for_timeout(1500)
        stats = httpx.get(f"{launch.url}/stats").json()
        info = httpx.get(f"{launch.url}/server_info").json()
        tree = httpx.get(f"{launch.url}/snapshot").json()["tree"]
        assert figure(page, "rows") == stats["num_running"] == page.locator(".rows .row").count() == 32
        assert figure(page, "waiting") == stats["num_waiting"]
        assert page.get_by_role("cell", name="paused", exact=True).count() == stats["num_waiting"]
        assert figure(page, "nodes") == tree["num_nodes"] > 0
        assert figure(page, "free-pages") == info["num_free_pages"]


def test_a_killed_tokenizer_shows_and_the_page_goes_on(
    visit: Callable[..., Visitor], launch: Launched
) -> None:
    page = visit().open(f"{launch.url}/#ring")
    row = page.locator("tr[data-process=tokenizer]")
    expect(row).to_contain_text("ready")
    before = row.locator("td").nth(2).inner_text()
    assert int(before) == launch.pid_of("tokenizer")
    os.kill(int(before), signal.SIGKILL)

    def shows() -> bool:
        cells = row.locator("td").all_inner_texts()
        return bool(cells[1] != "ready" or cells[2] != before)

    wait_until(shows, 1.0, "the death shows")
    expect(row.locator("td").nth(3)).to_have_text("1", timeout=1000 * START_S)
    expect(row).to_contain_text("ready", timeout=1000 * START_S)
    page.get_by_role("link", name="Chat").click()
    page.locator("#field-max_tokens").fill("3")
    page.get_by_label("Message", exact=True).fill("def ")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article.assistant[aria-busy=false] .facts")).to_contain_text("3 output tokens")


def test_it_asks_while_it_is_looked_at_and_never_else(
    visit: Callable[..., Visitor], launch: Launched
) -> None:
    visitor = visit()
    page = visitor.open(f"{launch.url}/", until="networkidle")

    def asked_in(seconds: float) -> int:
        visitor.requests.clear()
        began = time.monotonic()
        page.wait_for_timeout(1000 * seconds)
        snapshots = [request for request in visitor.requests if request.url.endswith("/snapshot")]
        assert len(snapshots) <= 4 * (time.monotonic() - began) + 1
        return len(snapshots)

    assert asked_in(1.0) == 0
    page.get_by_role("link", name="Ring").click()
    expect(page.get_by_role("heading", name="Processes")).to_be_visible()
    assert asked_in(2.0) >= 1
    page.get_by_role("link", name="Chat").click()
    page.wait_for_timeout(500)
    assert asked_in(1.5) == 0


def test_steps_are_shown_when_they_are_asked_for(visit: Callable[..., Visitor], launch: Launched) -> None:
    page = visit().open(f"{launch.url}/#ring")
    httpx.post(f"{launch.url}/v1/completions", json={"prompt": "x", "max_tokens": 3})
    page.get_by_role("button", name="Show the last steps").click()
    expect(page.locator(".chart[aria-label^=Milliseconds] canvas")).to_be_visible()


def test_nothing_of_what_was_said_is_in_the_state_of_the_page(
    visit: Callable[..., Visitor], launch: Launched
) -> None:
    """Neither on the page nor in what it has been told: prompts, outputs, labels of tenants, paths."""
    headers = {"X-Request-Id": "said", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    body = {"prompt": f"{CANARY}(", "max_tokens": 400, "seed": 1}
    body |= {"ignore_eos": True, "stream": True, "logprobs": 1}
    visitor = visit()
    visitor.allowed_statuses = {503}  # of /ready, while generation is paused
    told: list[str] = []
    visitor.page.on("response", lambda response: told.append(response.url))
    with httpx.stream("POST", f"{launch.url}/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        httpx.post(f"{launch.url}/pause_generation").raise_for_status()
        page = visitor.open(f"{launch.url}/#ring")
        expect(page.locator(".rows .row")).to_have_count(1)
        page.get_by_role("button", name="Show the last steps").click()
        expect(page.locator(".chart[aria-label^=Milliseconds] canvas")).to_be_visible()
        contents = [page.content(), httpx.get(f"{launch.url}/snapshot").text]
        httpx.post(f"{launch.url}/continue_generation").raise_for_status()
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
    page.goto(f"{launch.url}/#request/said")
    expect(page.locator(".sequence")).to_be_visible()
    contents += [page.content(), httpx.get(f"{launch.url}/timelines/said").text]
    contents.append(page.evaluate("JSON.stringify([history.state, {...localStorage}, {...sessionStorage}])"))
    assert {url.rpartition("/")[2] for url in told} >= {"snapshot", "stats", "iterations", "said"}
    output = [piece for piece in re.split(r"\s+", "".join(texts)) if len(piece) > 14]
    assert output
    for tell_tale in (CANARY, str(ROOT), str(launch.run_dir), "/tmp/", "Traceback", *output):
        assert not [content for content in contents if tell_tale in content], tell_tale


def test_a_profile_is_recorded_and_handed_over(visit: Callable[..., Visitor], launch: Launched) -> None:
    page = visit().open(f"{launch.url}/#ring")
    page.get_by_role("button", name="Record steps").click()
    expect(page.get_by_role("button", name="Stop recording")).to_be_visible()
    headers = {"X-Request-Id": "recorded"}
    body = {"prompt": "x", "max_tokens": 3}
    httpx.post(f"{launch.url}/v1/completions", json=body, headers=headers).raise_for_status()
    page.get_by_role("button", name="Stop recording").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert re.fullmatch(r"profile-[-0-9]+\.json", download.value.suggested_filename)
    events = json.loads(download.value.path().read_bytes())["traceEvents"]
    assert len([event for event in events if event["name"] == "recorded"]) == 4


def test_a_request_that_nobody_made_is_told(visit: Callable[..., Visitor], launch: Launched) -> None:
    visitor = visit()
    visitor.allowed_statuses = {404}
    page = visitor.open(f"{launch.url}/#request")
    page.get_by_label("X-Request-Id").fill("a/../b?c#d %")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("alert")).to_contain_text("no sampled request with this id")


def test_no_id_breaks_the_view(visit: Callable[..., Visitor], launch: Launched) -> None:
    visitor = visit()
    visitor.allowed_statuses = {400, 404}
    for fragment in ("..", ".", "%", "%E0%A4%A", "<b>", "a" * 300):
        page = visitor.open("about:blank")
        page = visitor.open(f"{launch.url}/#request/{fragment}")
        expect(page.get_by_role("alert")).to_be_visible()
