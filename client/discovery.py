"""Which launch a client talks to when it is not told: the environment's, else the only one alive."""

from __future__ import annotations

from pathlib import Path

from runtime.config import default_run_root, environment_run_dir
from runtime.endpoints import Endpoints
from runtime.errors import ConfigError, RingClosed
from runtime.run_dir import live_run_dirs


def find_run_dir(run_dir: str | Path | None = None) -> Path:
    """The run directory to connect to.

    Raises: RingClosed when no launch is alive, ConfigError that lists the candidates when there are several.
    """
    named = str(run_dir or environment_run_dir())
    if named:
        return Path(named).absolute()
    candidates = [path for path in live_run_dirs() if Endpoints(path).state_file.exists()]
    if not candidates:
        raise RingClosed(
            f"no runtime is alive under {default_run_root()}; "
            "start one with launch.py, or name its directory with run_dir"
        )
    if len(candidates) > 1:
        known = ", ".join(str(path) for path in candidates)
        raise ConfigError(
            f"run_dir: several runtimes are alive, name one of them (or set CAROUSEL_RUN_DIR): {known}"
        )
    return candidates[0]
