"""The scheduler's end of the worker process must not bring torch into the scheduler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_process_executor_is_imported_without_torch() -> None:
    code = "import model_worker.executors.process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
