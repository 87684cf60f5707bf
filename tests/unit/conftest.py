"""Fixtures of the unit tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _rare_collections() -> Iterator[None]:
    """They made up a twentieth of the time, and nothing here is large."""
    usual = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    yield
    gc.set_threshold(*usual)
