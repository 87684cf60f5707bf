"""SamplingCapability: base class of a sampling feature for all rows, with the hooks at which it may act.

    a row has a new holder   close_row() of the last one ─► open_row()
    a step                   apply() ─► the draw ─► remember()

A capability is only called for rows that need it, which the row's feature bits say (`columns.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling.columns import SamplingColumns
from model_worker.sampling.ops.base import SamplingOps
from model_worker.sampling.processors.runner import ProcessorRunner
from model_worker.sampling.step import SamplingStep, StepSample
from runtime.wire.plan import RowSetup


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """Parts of a sampler that all its capabilities share."""

    device: Device
    columns: SamplingColumns
    ops: SamplingOps
    max_rows: int
    max_len: int  # tokens of the longest sequence
    vocab_size: int
    processors: ProcessorRunner | None = None


class SamplingCapability:
    """A capability that does nothing; subclasses override the hooks they need."""

    bits: ClassVar[int]
    """Feature bits. A row with one of them is opened, closed and applied to."""
    remembered: ClassVar[int] = 0
    """Feature bits of rows whose steps are remembered."""

    def __init__(self, context: SamplerContext) -> None:
        self._context = context

    def open_row(self, setup: RowSetup) -> None:
        """Start a stay of a row that needs this. Ids outside the vocabulary are ignored."""

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Change logits [S, V] float32 in place, before the draw."""

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """Record the drawn tokens on the device, because the next step may run before the host sees them."""

    def close_row(self, row: int) -> None:
        """End the stay of a row's holder, whose columns are still in place."""
