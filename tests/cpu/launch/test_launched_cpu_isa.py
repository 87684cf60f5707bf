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
