"""Fixture for tests that ask a server through LiteLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import LiteLLM, which asks nobody on the internet here, beside an event loop that is closed in the end.

    Its blocking calls make a loop where there is none and leave it open. Python then complained in whichever
    test collected garbage next.
    """
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks GitHub for prices
    monkeypatch.setenv("NO_PROXY", "*")
    import litellm

    with asyncio.Runner() as runner:
        runner.get_loop()
        yield litellm
