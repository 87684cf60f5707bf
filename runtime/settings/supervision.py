"""How the launcher starts, watches, restarts and ends the processes."""

from __future__ import annotations

from typing import Annotated, Literal

from runtime.settings.serving import ServingSettings
from runtime.settings.setting import setting


class SupervisionSettings(ServingSettings, frozen=True, forbid_unknown_fields=True):
    restart: Annotated[
        Literal["auto", "never"],
        setting("what a process that dies or hangs leads to: auto restarts it, never ends the launch"),
    ] = "auto"
    max_restarts: Annotated[
        int,
        setting("restarts of one process within restart_window; one more ends the launch", ge=0, le=10000),
    ] = 10
    max_engine_restarts: Annotated[
        int,
        setting("the same for the engine: scheduler and workers, restarted as one", ge=0, le=10000),
    ] = 5
    restart_window: Annotated[
        float, setting("seconds after which a restart is forgotten", gt=0.0, le=86400.0)
    ] = 60.0
    stall_timeout: Annotated[
        float,
        setting(
            "seconds without a turn of its work loop after which a process counts as hung and is killed",
            ge=1.0,
            le=86400.0,
        ),
    ] = 30.0
    step_timeout: Annotated[
        float, setting("the same for one step of the model; the slowest must fit", ge=1.0, le=86400.0)
    ] = 300.0
    start_timeout: Annotated[
        float, setting("seconds the processes have to get ready", gt=0.0, le=86400.0)
    ] = 600.0
    drain_timeout: Annotated[
        float,
        setting(
            "seconds that running requests have to finish after Ctrl-C or SIGTERM; new ones are refused",
            ge=0.0,
            le=86400.0,
        ),
    ] = 30.0
    parent_pid: Annotated[int, setting("end when this process ends; 0: do not watch", ge=0)] = 0
