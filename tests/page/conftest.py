"""Debian's Chromium, headless, and a page in it that may complain of nothing and ask no other host.

Started by `make test-page` alone, which installs what it needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import Answer
from tests.harness.ring.launched import SLACK, Launched, launched

WAIT_MS = 3000 * SLACK
WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
    window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""


class Visitor:
    """One tab, and what must not have happened in it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[Request] = []
        self.allowed_statuses: set[int] = set()
        """Statuses that a test causes: the browser tells of each on the console."""
        page.set_default_timeout(WAIT_MS)
        page.add_init_script(WATCH_POLICY)
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request))

    def _heard(self, message: ConsoleMessage) -> None:
        is_caused = any(f"status of {status} " in message.text for status in self.allowed_statuses)
        if message.type in ("error", "warning") and not is_caused:
            self.complaints.append(message.text)

    def open(self, url: str, *, until: Literal["load", "networkidle"] = "load") -> Page:
        """Go there. Until "networkidle": all that the page asks for by itself has come, too."""
        self.page.goto(url, wait_until=until)
        return self.page

    def check(self) -> None:
        assert self.complaints == []
        assert self.page.evaluate("window.violations") == []
        own = urlsplit(self.page.url).netloc
        assert {urlsplit(request.url).netloc for request in self.requests} <= {own}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "no Chromium: apt-get install chromium"
    # Root's Chromium has no sandbox of its own.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visitor]]:
    """Open another tab; each is checked at the end."""
    visitors: list[Visitor] = []
    with ExitStack() as stack:

        def open_tab(**options: Any) -> Visitor:
            context = stack.enter_context(browser.new_context(**options))
            visitors.append(Visitor(context.new_page()))
            return visitors[-1]

        yield open_tab
        for visitor in visitors:
            visitor.check()


@contextmanager
def scripted(run_dir: Path, answer: Answer, **settings: Any) -> Iterator[Front]:
    """A server whose model says what `answer` has it say."""
    with http_front(run_dir, answer, **settings) as front:
        yield front


@pytest.fixture(scope="session")
def launch() -> Iterator[Launched]:
    with launched(
        *("--dtype", "float32", "--cpu-threads", "1", "--max-running-requests", "32"),
        *("--timeline-sample-rate", "0", "--restart", "auto"),
    ) as launch:
        yield launch
