"""The run directory of a runtime that an LLM starts for itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from carousel.client.own_runtime import RUN_DIR_BYTES, _make_run_dir
from runtime.ring.endpoints import MAX_RUN_DIR_BYTES, Endpoints


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short name, which `tmp_path` has not where TMPDIR itself is long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("too_long", [False, True])
def test_it_is_short_enough_for_sockets_wherever_temporary_files_are(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, too_long: bool
) -> None:
    """TMPDIR of a job on a cluster is often long, and nobody may name a run directory to LLM."""
    space = MAX_RUN_DIR_BYTES - RUN_DIR_BYTES - len(str(short_path)) - 1 + too_long
    folder = short_path / ("x" * space)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    made = _make_run_dir()
    try:
        assert made.parent == (Path("/tmp") if too_long else folder)
        assert Endpoints(made).run_dir == made
    finally:
        made.rmdir()
