"""Fixture for tests of many small objects, in which garbage collections took a twentieth of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely in all tests of the folder whose conftest.py imports this."""
    usual = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    yield
    gc.set_threshold(*usual)
