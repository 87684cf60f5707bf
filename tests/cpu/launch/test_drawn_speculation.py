"""Combinations of parameters and ways to guess, drawn at random: the output is that without guesses."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from carousel import AsyncClient, Client
from tests.harness.ring.drawn_requests import KINDS, WAYS, compare, compare_each
from tests.harness.ring.launched import launched

GUESSING = ("--speculative-algorithm", "NGRAM", "--max-running-requests", "12", "--no-http")
SETTINGS: dict[str, tuple[str, ...]] = {
    "as it comes": (),
    "short of pages": (
        *("--page-size", "4", "--max-total-tokens", "320", "--schedule-conservativeness", "0.1"),
        *("--chunked-prefill-size", "32"),
    ),
    "without overlap": ("--disable-overlap-schedule", "--page-size", "1"),
    "deterministic": ("--deterministic",),
    "two ranks": ("--tp-size", "2"),
}
FULL = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("setting", "num_requests"),
    [("short of pages", 60), ("two ranks", 20), *(pytest.param(name, 600, marks=FULL) for name in SETTINGS)],
)
def test_drawn_requests_have_the_output_of_no_guesses(setting: str, num_requests: int) -> None:
    is_exact = setting == "deterministic"
    dtype = "bfloat16" if is_exact else "float32"

    async def run() -> int:
        async with AsyncClient(launch.run_dir) as client:
            tolerance = 0.0 if is_exact else 1e-5
            num_right = await compare(client, 1, num_requests, tolerance)
            each = await compare_each(client, num_requests // 60, tolerance)
            assert all(each[kind, "drafts"] for kind in KINDS) or num_requests < 60
            return num_right

    with launched(*GUESSING, "--dtype", dtype, *SETTINGS[setting]) as launch:
        assert asyncio.run(run()) > num_requests
        with Client(launch.run_dir) as client:
            info = client.server_info()
    if setting == "short of pages":
        assert info["num_retracted"] > 0


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_each_parameter_has_the_output_of_no_guesses_whoever_makes_them() -> None:
    """The end is the same, too, where guesses go on behind it."""

    async def run() -> None:
        async with AsyncClient(launch.run_dir) as client:
            num_right = await compare_each(client, 500, 1e-5)
        assert {key for key, count in num_right.items() if count} == set(product(KINDS, WAYS))

    arguments = ("--speculative-algorithm", "NGRAM", "--max-running-requests", "48", "--no-http")
    with launched(*arguments, "--dtype", "float32") as launch:
        asyncio.run(run())
