"""Where to find a runtime: at the named directory or address, the environment's, else the only one alive."""

from __future__ import annotations

from pathlib import Path

from carousel.client.connection.target import Target, make_target
from runtime.base.environment import default_run_root, environment_run_dir
from runtime.base.errors import ConfigError, RingClosed
from runtime.ring.endpoints import Endpoints
from runtime.ring.run_dir import live_run_dirs


def find_target(where: str | Path | None = None, curve_dir: str | Path | None = None) -> Target:
    """The runtime to connect to: a run directory, or an address tcp://HOST:PORT with the keys in `curve_dir`.

    Raises: RingClosed when no launch is alive, ConfigError that lists the candidates when there are several,
    ConfigError for a wrong address or key.
    """
    return make_target(where or environment_run_dir() or find_run_dir(), curve_dir)


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
