"""SamplingStep: the rows whose tokens a step samples, their features, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling.columns import FeatureArray, SampleRows, rows_with
from model_worker.sampling.logprobs import Logprobs
from runtime.sampling import features as bit
from runtime.wire.format import LongArray, RowMasks

MASKED = 1 << 30
"""Feature bit of a step in which some rows have a mask. It is not a row's feature, because masks come with
the step.
"""
NO_ROWS: LongArray = np.zeros(0, np.int64)
CHANGES = bit.CHANGES | bit.PROCESSED | MASKED  # the logits, before the draw


@dataclass(slots=True)
class StepSample:
    """Results of a step of S rows."""

    tokens: Tensor  # [S] int64
    logprobs: Logprobs | None = None  # [m], of the rows that asked
    logprobs_of: LongArray = field(default_factory=lambda: NO_ROWS)  # [m] which of S they belong to
    logits: Tensor | None = None  # [m, V] float32, raw, of the rows that asked
    logits_of: LongArray = field(default_factory=lambda: NO_ROWS)  # [m] which of S they belong to
    scores: Tensor | None = None  # [m, V] float32, that logits processors left of rows of beam searches
    scores_of: LongArray = field(default_factory=lambda: NO_ROWS)  # [m] which of S they belong to
    errors: Sequence[tuple[int, str]] = ()  # which of S have no token, and why


class StepRows:
    """Some rows of a step. Lists of them are copied to the device only on demand; kernels that look at every
    row of the step do not need them.
    """

    def __init__(self, step: SamplingStep, index: LongArray) -> None:
        """index: indices among the step's rows."""
        self.step = step
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def at(self) -> Tensor:
        """Indices among the step's rows, on the device."""
        return self.step.device.tensor(self.index)

    @cached_property
    def rows(self) -> Tensor:
        """Rows of the tables, on the device."""
        return self.step.sample_rows.rows[self.at]

    @property
    def positions(self) -> Tensor:
        return self.step.sample_rows.positions[self.at]

    @property
    def rows_host(self) -> LongArray:
        return self.step.sample_rows.rows_host[self.index]

    @property
    def positions_host(self) -> LongArray:
        return self.step.sample_rows.positions_host[self.index]

    def where(self, condition: npt.NDArray[np.bool_]) -> StepRows:
        """Return those rows for which the condition holds."""
        return StepRows(self.step, self.index[condition])


class SamplingStep:
    """One step of S rows. present: feature bits that at least one of them has."""

    __slots__ = ("_found", "device", "features", "masks", "present", "sample_rows")

    def __init__(
        self, device: Device, sample_rows: SampleRows, features: FeatureArray, masks: RowMasks
    ) -> None:
        """features: bits of each row. masks: by row, for some rows."""
        self.device = device
        self.sample_rows = sample_rows
        self.features = features
        self.masks = masks
        self.present = int(np.bitwise_or.reduce(features, initial=0)) | (MASKED if masks else 0)
        self._found: dict[int, StepRows] = {}

    def __len__(self) -> int:
        return len(self.features)

    def rows_with(self, bits: int) -> StepRows:
        """Return the rows that have one of `bits`."""
        if bits not in self._found:
            self._found[bits] = StepRows(self, rows_with(self.features, bits))
        return self._found[bits]
