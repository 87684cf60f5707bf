"""Kernels are interpreted here; a second rank is one for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pretended_gpu.interpreter import patched_once
from tests.pretended_gpu.rank_process import RankProcess


@pytest.fixture(scope="session")
def other() -> Iterator[RankProcess]:
    """The second of two ranks."""
    with RankProcess(1, 2) as other:
        yield other


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once():
        yield
