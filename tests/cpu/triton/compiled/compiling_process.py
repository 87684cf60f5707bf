"""A process in which kernels are compiled: in that of these tests they are interpreted, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[4]


def output_of(*arguments: str, **variables: str) -> str:
    """Run `python -m ARGUMENT ...` with these environment variables, which must succeed, and return what it
    prints.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment | variables,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
