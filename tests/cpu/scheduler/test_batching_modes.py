"""With a real model, too, no batching type and no capacity policy shows in the output."""

from __future__ import annotations

from functools import cache

import pytest

from runtime.settings.config import DEMO_MODEL
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.serving_ring import Ring, Setting

PROMPTS = [[n % 7 + 20, *range(40 + n, 60 + 2 * n)] for n in range(12)]
SAMPLING = [SamplingParams(max_tokens=24, temperature=1.0, seed=n, ignore_eos=True) for n in range(12)]
TINY = {"pool_tokens": 256, "max_rows": 8, "chunk": 32}


@cache
def reference() -> list[list[int]]:
    ring = Ring(DEMO_MODEL, Setting(radix=False, overlap=False))
    try:
        return ring.generate(PROMPTS, SAMPLING, solo=True)
    finally:
        ring.close()


@pytest.mark.parametrize(
    ("batching", "capacity", "policy"),
    [
        ("inflight_fused", "guaranteed_no_evict", "shortest-first"),
        ("inflight", "max_utilization", "priority"),
        ("static", "static_batch", "fcfs"),
        (
            "inflight_fused",
            "examples.guaranteed_no_evict_scheduler:GuaranteedNoEvictScheduler",
            "lof",
        ),
    ],
)
def test_tokens_are_those_of_each_prompt_alone(batching: str, capacity: str, policy: str) -> None:
    setting = Setting(batching=batching, capacity=capacity, policy=policy, **TINY)  # type: ignore[arg-type]
    ring = Ring(DEMO_MODEL, setting)
    try:
        assert ring.generate(PROMPTS, SAMPLING, solo=False) == reference()
        assert (ring.lifecycle.num_retracted > 0) == (capacity == "max_utilization")
    finally:
        ring.close()
