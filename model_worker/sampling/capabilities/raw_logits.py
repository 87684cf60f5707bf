"""RawLogits: keeps the model's logits for rows that return them."""

from __future__ import annotations

from torch import Tensor

from model_worker.sampling.capabilities.base import SamplingCapability
from model_worker.sampling.step import SamplingStep, StepSample
from runtime.sampling.features import LOGITS


class RawLogits(SamplingCapability):
    bits = remembered = LOGITS

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Keep the logits of rows that asked for raw logits, before anything edits them."""
        self._raw = logits[step.rows_with(LOGITS).at]

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """Put the kept logits into the result of the step."""
        sampled.logits, sampled.logits_of = self._raw, step.rows_with(LOGITS).index
        del self._raw
