"""A launch that is held back to fewer instructions than its CPU has."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from carousel.client.sync import Client
from runtime.wire.sampling_params import SamplingParams
from tests.harness.models.native import LEAST_ISA, needs_compiler
from tests.harness.ring.launched import Launched, launched

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    arguments = ("--device=cpu", "--port=0", "--dtype=float16", "--deterministic", "--log-level=debug")
    with launched(*arguments, "--max-running-requests=4", f"--cpu-isa={LEAST_ISA}") as launch:
        yield launch


def test_a_launch_keeps_to_the_flag_and_says_so(launch: Launched) -> None:
    with Client(launch.run_dir) as client, httpx.Client(base_url=launch.url, timeout=60) as http:
        assert client.generate("def f(x):", SamplingParams(max_tokens=4, temperature=0.0), timeout=60).text
        assert http.get("/server_info").json()["settings"]["cpu_isa"] == LEAST_ISA
    assert f"CPU kernels use instruction sets up to {LEAST_ISA}" in launch.log()


def test_float16_is_served_by_kernels_alone_and_may_be_deterministic(launch: Launched) -> None:
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        assert http.get("/server_info").json()["settings"]["dtype"] == "float16"
        body = {"prompt": "def f(x):", "max_tokens": 8, "temperature": 0.0}
        answers = [http.post("/v1/completions", json=body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1] != ""
    assert "kernels:" in launch.log()
    assert "computed more slowly" not in launch.log()
    assert "forward is not recorded" not in launch.log()
