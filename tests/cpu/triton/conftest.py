"""Kernels are interpreted here; a second rank is one for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn
from unittest.mock import patch

import pytest

from tests.harness.pretended_gpu.interpreter import patched_once, shuffled_programs
from tests.harness.pretended_gpu.nccl import ProcessGroupNCCL
from tests.harness.pretended_gpu.rank_process import RankProcess


@pytest.fixture(scope="session")
def other() -> Iterator[RankProcess]:
    """The second of two ranks. What it dies of is what its collectives raise here."""

    def lost(group: ProcessGroupNCCL, why: str, timeout_s: float) -> NoReturn:
        other.result()
        raise AssertionError(why)

    with RankProcess(1, 2) as other, patch.object(ProcessGroupNCCL, "lost", lost):
        yield other


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    with patched_once(), shuffled_programs():
        yield
