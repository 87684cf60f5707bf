"""RuntimeLink: the connection of an executor to its runtime, which is its own or one that it is
attached to.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from carousel.client.connection.connection import Connection
from carousel.client.connection.target import RunDirTarget
from carousel.client.core.session import Session
from carousel.client.own_runtime import OwnRuntime
from carousel.trtllm.executor_settings import runtime_settings
from carousel.trtllm.executor_stats import ExecutorStats
from carousel.trtllm.result_mailbox import ResultMailbox
from runtime.base.errors import CarouselError, ConfigError
from runtime.ring.endpoints import TCP_SCHEME, Endpoints
from runtime.ring.process import LaunchFile
from runtime.settings.config import RuntimeConfig
from runtime.wire.status_page import StatusPage


class RuntimeLink:
    """Session with a runtime, and the contents of the runtime's files."""

    def __init__(
        self, run_dir: Path, runtime: OwnRuntime | None, connect_timeout_s: float, ring_timeout_s: float
    ) -> None:
        """Connect once the runtime is ready. `runtime` is the executor's own, which is stopped if
        this fails.
        """
        self._endpoints = Endpoints(run_dir)
        self.stop_runtime = _stop_nothing if runtime is None else runtime.stop
        try:
            if runtime is not None:
                runtime.wait_ready()
            self.session: Session[ResultMailbox] = Session(
                partial(
                    Connection,
                    RunDirTarget(run_dir),
                    connect_timeout_s=connect_timeout_s,
                    ring_timeout_s=ring_timeout_s,
                ),
                ResultMailbox,
            )
        except BaseException:
            self.stop_runtime()
            raise

    def wait_open(self) -> RuntimeConfig:
        """Wait until the connection is open. Returns the runtime's settings."""
        self.session.connection.opened.result()
        self._status = StatusPage(self._endpoints.status_file)
        return LaunchFile.read(self._endpoints.config_file).config

    def latest_stats(self) -> ExecutorStats | None:
        """Return the scheduler's published figures; None before the first ones."""
        status = self._status.read("scheduler")
        if status.state == "absent":
            return None
        return ExecutorStats(
            num_active_requests=status.num_running,
            num_queued_requests=status.num_waiting,
            num_received_requests=status.num_received,
            current_batch_size=status.batch_size,
            num_free_pages=status.num_free_pages,
            num_pages=status.num_pages,
        )

    def disconnect(self, error: CarouselError) -> None:
        """End all requests with an error, then the connection."""
        self.session.end_all(error)
        self.session.connection.close()
        self.session.fail_all(error)


def started(given: dict[str, Any]) -> OwnRuntime:
    """Start a runtime with an executor's arguments. Raises ConfigError that names the wrong one."""
    named_by: dict[str, str] = {}
    wanted = runtime_settings(given, named_by)
    return OwnRuntime(wanted.pop("model", ""), wanted, named_by)


def attachable(run_dir: str | Path, given: dict[str, Any]) -> Path:
    """Return a run directory to attach to. Raises ConfigError if there are settings, which only a new runtime
    can take.
    """
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name}: the runtime at run_dir has been started with its own")
    if str(run_dir).startswith(TCP_SCHEME):
        raise ConfigError("run_dir: a directory of this machine; over TCP use Client or AsyncClient")
    return Path(run_dir).absolute()


def _stop_nothing() -> None:
    """Do nothing: a runtime that an executor is attached to continues without it."""
