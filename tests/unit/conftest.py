"""Collections of garbage are rare here, and the demo model's tokenizer is read without transformers."""

from __future__ import annotations

import pytest

from runtime.settings.config import DEMO_MODEL
from runtime.text import tokenizer
from runtime.text.tokenizer import Tokenizer
from tests.harness.rare_collections import rare_collections

__all__ = ["rare_collections"]


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    """The demo model's tokenizer, without its chat template; nobody changes it. That its file has all that
    transformers makes of it: tests/cpu/tokenizer/test_text_tokenizer.py.
    """
    return tokenizer.load(DEMO_MODEL, prepared=DEMO_MODEL / "tokenizer.json")
