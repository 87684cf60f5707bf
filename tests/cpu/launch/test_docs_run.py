"""Blocks of code in pages, run as a reader would: against the demo model, page by page from the top."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import carousel
from runtime.settings.config import DEMO_MODEL
from tests.harness.doc_blocks import Block, blocks
from tests.harness.ring.launched import ROOT, Launched, launched

pytestmark = pytest.mark.full

PAGES = [
    pytest.param(list(found), id=page)
    for page, found in groupby((block for block in blocks() if block.is_run), key=lambda block: block.page)
]
PORT = "127.0.0.1:30000"
"""Where the server of every page is."""
STAND_INS = {
    '"/path/to/model"': repr(str(DEMO_MODEL)),
    '"DIR"': repr(str(DEMO_MODEL)),
    "[1, 15043, 29892]": "[1, 150, 298]",  # ids of a vocabulary as large as the demo model's
}
"""Stand-ins for readers' own models."""
SHELL = f"""
set -e -o pipefail
shopt -s expand_aliases
curl() {{ command curl --silent --show-error --fail-with-body "$@"; }}
python() {{ [ "$2" = bench_serving ] && set -- "$@" --base-url "$URL"; {sys.executable} "$@"; }}
"""
"""Commands fail where the server refuses, and a client without an address asks the launch under test."""
PREPARED = {
    "docs/batch_manager.md": """
waiting = [InferenceRequest(1, {"input_ids": np.array([[5, 6]]), "request_output_len": np.array([[3]])})]
answered = []
def get_inference_requests(limit): return [waiting.pop() for _ in waiting[:limit]]
def send_response(number, tensors, is_final, error): answered.append((number, is_final, error))
def poll_stop_signal(): return set()
def return_stats(text): pass
""",
    "docs/executor.md": """
params = SamplingParams(max_tokens=3)
prompts = [[1, 2, 3], [4, 5]]
""",
}
"""Names that the code of a page takes from the reader's."""


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    """The launch of the README's first command."""
    with launched("--cpu-threads", "1") as launch:
        yield launch.wait_ready()


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_works(
    launch: Launched, page: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAROUSEL_RUN_DIR", str(launch.run_dir))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {name: getattr(carousel, name) for name in carousel.__all__}
    exec(f"import numpy as np\n{PREPARED.get(page[0].page, '')}", names)
    try:
        for block in page:
            text = block.text.replace(f"http://{PORT}", launch.url)
            for shown, real in STAND_INS.items():
                text = text.replace(shown, real)
            if block.language == "bash":
                run_shell(text, launch.url)
            else:
                exec(compile(text, str(block), "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, carousel.GenerationExecutor):
                value.shutdown()
    if "answered" in names:
        assert names["answered"][-1] == (1, True, "")


def run_shell(text: str, url: str) -> None:
    done = subprocess.run(
        ["bash", "-c", SHELL + text],
        env={**os.environ, "URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
