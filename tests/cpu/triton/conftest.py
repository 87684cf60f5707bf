"""Kernels are interpreted here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pretended_gpu.interpreter import patched_once


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once():
        yield
