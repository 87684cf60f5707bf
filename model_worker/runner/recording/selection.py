"""Choice of how steps are recorded, by the name of their Ops. No other module chooses it."""

from __future__ import annotations

from collections.abc import Callable

from model_worker.distributed.layout import Layout
from model_worker.runner.recording import RECORDERS, STAGE_RECORDERS
from model_worker.runner.recording.base import (
    Recorder,
    Recording,
    StageRecorder,
    StageRecording,
    StepParts,
)
from runtime.base.registry import resolve


def record_steps(parts: StepParts, on_progress: Callable[[], None]) -> Recording | None:
    """Record the steps of these parts, if their Ops has a recorder. Raises ConfigError."""
    if parts.ops.name not in RECORDERS:
        return None
    record: Recorder = resolve("recorder", parts.ops.name, RECORDERS)
    return record(parts, on_progress)


def record_stage(parts: StepParts, layout: Layout) -> StageRecording | None:
    """Record the layers of a pipeline stage, if their Ops has a recorder."""
    if parts.ops.name not in STAGE_RECORDERS:
        return None
    record: StageRecorder = resolve("recorder of stages", parts.ops.name, STAGE_RECORDERS)
    return record(parts, layout)
