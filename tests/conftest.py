"""What tests of all kinds share."""

from __future__ import annotations

import pytest

from runtime.config import DEMO_MODEL
from text import tokenizer
from text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    """The demo model's tokenizer; nobody changes it."""
    return tokenizer.load(DEMO_MODEL)
