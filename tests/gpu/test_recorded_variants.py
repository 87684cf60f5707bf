"""Launches of these tests are those that `gpu-prepare` compiles for them."""

from __future__ import annotations

import pytest

from benchmarks.gpu.prepare import RECORDED
from tests.gpu.conftest import compiled_so_far
from tests.harness.pretended_gpu import is_pretended


@pytest.mark.skipif(not is_pretended(), reason="launches are recorded on the pretended GPU")
def test_what_was_launched_is_in_the_record() -> None:
    """The last of the files, so all of the others' launches are known."""
    missing = set(compiled_so_far()) - set(RECORDED.read_text().splitlines())
    assert not missing, f"record them: pytest tests/gpu --pretend --variants={RECORDED}"
