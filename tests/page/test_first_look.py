"""The page as a whole: its size, how soon it can be used, by whom, and the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.harness.http.http_front import Front
from tests.harness.ring.fake_ring import spell
from tests.harness.ring.launched import SLACK, Launched
from tests.page.conftest import Visitor, scripted

MAX_BYTES = 250_000
MAX_FIRST_MS = 1000.0
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Front]:
    with scripted(tmp_path, spell("abc"), api_key="secret") as front:
        yield front


def say(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill("def ")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article.assistant[aria-busy=false] footer")).to_be_visible()


def test_all_views_take_little_on_the_wire(visit: Callable[..., Visitor], launch: Launched) -> None:
    page = visit().page
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    received: list[float] = []
    session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
    page.goto(f"{launch.url}/", wait_until="networkidle")
    assert len(received) > 12
    page.get_by_role("link", name="Ring").click()
    expect(page.locator(".chart canvas").first).to_be_visible()
    page.get_by_role("link", name="Request").click()
    assert sum(received) < MAX_BYTES


def test_it_can_be_used_at_once(visit: Callable[..., Visitor], launch: Launched) -> None:
    """From the navigation until a message can be sent, with nothing in the browser's cache."""
    times = []
    for _ in range(5):
        page = visit().page
        page.goto(f"{launch.url}/", wait_until="commit")
        page.get_by_label("Message", exact=True).fill("x")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        times.append(page.evaluate("performance.now()"))
    assert median(times) < SLACK * MAX_FIRST_MS, times


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    visit: Callable[..., Visitor], launch: Launched, scheme: str, size: dict[str, int]
) -> None:
    page = visit(color_scheme=scheme, viewport=size).open(f"{launch.url}/")
    settings = page.get_by_text("Settings of requests")
    if size is PHONE:
        settings.click()
    page.locator("#field-max_tokens").fill("12")
    page.get_by_label("Log-probabilities").select_option("2")
    if size is PHONE:
        settings.click()
    say(page)
    page.locator(".token").first.click()
    problems: list[Any] = []

    def look() -> None:
        result = Axe().run(page).response
        problems.extend(
            (each["id"], each["nodes"][0]["html"])
            for each in result["violations"]
            if each["impact"] in ("serious", "critical")
        )
        # Nothing is cut off: a phone scrolls down, never aside.
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    look()
    page.get_by_text("Request", exact=True).last.click()
    link = page.get_by_role("link", name="timeline").get_attribute("href")
    look()
    page.get_by_role("link", name="Ring").click()
    expect(page.locator(".chart canvas").first).to_be_visible()
    look()
    page.evaluate("href => location.hash = href", link)
    expect(page.locator(".sequence")).to_be_visible()
    look()
    assert problems == []


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab(
    visit: Callable[..., Visitor], keyed: Front
) -> None:
    visitor = visit()
    url = f"http://127.0.0.1:{keyed.port}/"
    page = visitor.open(url, until="networkidle")
    expect(page.locator(".readiness")).to_have_text("ready")
    outside = {request.url for request in visitor.requests if "/page/" not in request.url}
    assert outside == {url, f"{url}ready"}, "asked for more than files without a key"
    visitor.allowed_statuses = {401}
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Use").click()
    expect(page.locator(".key")).to_contain_text("does not know this key")
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Use").click()
    expect(page.get_by_label("API key")).to_have_count(0)
    expect(page.get_by_label("Model")).to_have_value("fake")
    page.locator("#field-max_tokens").fill("8")
    say(page)
    assert page.locator("article.assistant .text").inner_text().strip() == "abc"
    page.get_by_text("Request", exact=True).last.click()
    command = page.locator(".copied pre").nth(1).inner_text()
    assert "secret" not in page.content()
    assert "Bearer $CAROUSEL_API_KEY" in command
    assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("fake")
    page.get_by_role("button", name="Forget the key").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0
    expect(visit().open(url).get_by_label("API key")).to_be_visible()


def test_it_works_below_a_root_path(visit: Callable[..., Visitor], tmp_path: Path) -> None:
    with scripted(tmp_path, spell("abc"), root_path="/llm") as front:
        visitor = visit()
        page = visitor.open(f"http://127.0.0.1:{front.port}/llm/")
        page.locator("#field-max_tokens").fill("8")
        say(page)
        assert all("/llm/" in request.url for request in visitor.requests)
