"""A launch that is held back to fewer instructions than its CPU has."""

from __future__ import annotations

import httpx

from carousel.client.sync import Client
from runtime.wire.sampling_params import SamplingParams
from tests.harness.models.native import LEAST_ISA, needs_compiler
from tests.harness.ring.launched import launched


@needs_compiler
def test_a_launch_keeps_to_the_flag_and_says_so() -> None:
    with launched("--device=cpu", "--port=0", "--max-running-requests=4", f"--cpu-isa={LEAST_ISA}") as launch:
        with Client(launch.run_dir) as client, httpx.Client(base_url=launch.url, timeout=60) as http:
            assert client.generate(
                "def f(x):", SamplingParams(max_tokens=4, temperature=0.0), timeout=60
            ).text
            assert http.get("/server_info").json()["settings"]["cpu_isa"] == LEAST_ISA
        assert f"CPU kernels use instruction sets up to {LEAST_ISA}" in launch.log()


@needs_compiler
def test_float16_is_served_by_kernels_alone_and_may_be_deterministic() -> None:
    arguments = ("--device=cpu", "--port=0", "--dtype=float16", "--deterministic", "--log-level=debug")
    with launched(*arguments, f"--cpu-isa={LEAST_ISA}") as launch:
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
