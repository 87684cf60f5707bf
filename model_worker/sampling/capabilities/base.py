"""SamplingCapability: one capability of sampling, for all rows, and the moments at which it may act.

    a row has a new holder   close_row() of the last one ─► open_row()
    a step                   apply() ─► the draw ─► remember()

Only capabilities that a row needs are called, for the rows that need them. What a row needs is a bit of its
features (`columns.py`).
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
    """The parts of a sampler that all its capabilities share."""

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
    """Features of which a row has one when it is opened, closed and applied to."""
    remembered: ClassVar[int] = 0
    """Features of which a row has one in steps that are remembered."""

    def __init__(self, context: SamplerContext) -> None:
        self._context = context

    def open_row(self, setup: RowSetup) -> None:
        """Begin a stay of a row that needs this. Ids that the vocabulary does not have are ignored."""

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Change logits [S, V] float32 in place, before the draw."""

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """See the drawn tokens. The next step must know of them whether or not the host sees them before."""

    def close_row(self, row: int) -> None:
        """End the stay of a row's holder. Columns are still its."""
