"""A real Prometheus (Debian's package) that scrapes one server, and answers queries."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.harness.ring.launched import ROOT, free_ports, wait_until

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: carousel
    static_configs: [{{targets: ["{target}"]}}]
"""


def tool(name: str) -> str:
    path = shutil.which(name)
    assert path, f"no {name}: apt-get install prometheus"
    return path


class Prometheus:
    """A running server of metrics."""

    def __init__(self, port: int) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self._scraped_at = 0.0
        self._moment: dict[str, float] = {}

    def _ask(self, path: str, **about: Any) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=about).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an expression at this moment, or at that of `stay`."""
        series: list[dict[str, Any]] = self._ask("query", query=expression, **self._moment)["result"]
        return series

    def value(self, expression: str) -> float:
        """Value of an expression with one series. Raises AssertionError where it has none or several."""
        series = self.query(expression)
        assert len(series) == 1, (expression, series)
        return float(series[0]["value"][1])

    def history(self, selector: str) -> list[dict[str, Any]]:
        """All samples of these series."""
        return self.query(f"{selector}[1h]")

    def rules(self) -> list[dict[str, Any]]:
        groups = self._ask("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_scrapes(self, count: int) -> None:
        """Wait until so many scrapes have begun from now on and have had an answer."""
        for _ in range(count):
            wait_until(partial(self._has_scraped, time.time()), 10.0, "a scrape")

    def stay(self) -> None:
        """Evaluate all later queries at the time of the next scrape that succeeds. After one that fails, as
        on a busy machine, no series has a value.
        """
        self.wait_scrapes(1)
        self._moment = {"time": self._scraped_at}

    def _has_scraped(self, since: float) -> bool:
        for series in self.query("timestamp(up) and up == 1"):
            self._scraped_at = float(series["value"][1])
            return self._scraped_at > since
        return False


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    """Let it scrape `target`, with our rules."""
    port = free_ports(1)
    (folder / "prometheus.yml").write_text(CONFIG.format(rules=RULES, target=target))
    with (folder / "log").open("w+b") as log:
        process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "GOMAXPROCS": "1"},
        )
        server = Prometheus(port)
        try:

            def is_up() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                try:
                    return server.http.get("/-/ready").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(is_up, 10.0, "Prometheus is there")
            yield server
        finally:
            server.http.close()
            process.terminate()
            process.wait()
