"""A launch of the runtime for benchmarks: ready when the block begins, ended when it ends."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any, NamedTuple

import msgspec

LAUNCHER = Path(__file__).resolve().parent.parent / "launch.py"
START_TIMEOUT_S = 300.0
LOG_TAIL = 4000


class Server(NamedTuple):
    url: str
    run_dir: Path
    launcher_pid: int


@contextmanager
def launched(*arguments: str, module: str = "") -> Iterator[Server]:
    """Context manager for launch.py with these arguments on a free port. module: what to start instead of
    launch.py. Raises RuntimeError with its log if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        program = ["-m", module] if module else [str(LAUNCHER)]
        command = [sys.executable, *program, "--port", "0", "--run-dir", str(run_dir), *arguments]
        with log.open("wb") as out, Popen(command, stdin=DEVNULL, stdout=out, stderr=STDOUT) as process:
            try:
                state = _wait_ready(process, run_dir / "state.json", log)
                yield Server(f"http://127.0.0.1:{state['port']}", run_dir, process.pid)
            finally:
                process.terminate()


def _wait_ready(process: Popen[bytes], state_file: Path, log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if state_file.exists():
            state: dict[str, Any] = msgspec.json.decode(state_file.read_bytes())
            if state["state"] == "ready":
                return state
        time.sleep(0.05)
    raise RuntimeError(f"the launch did not get ready: {log.read_text(errors='replace')[-LOG_TAIL:]}")
