"""GrammarMasks: applies the masks that come with a step."""

from __future__ import annotations

from torch import Tensor

from model_worker.sampling.capabilities.base import SamplingCapability
from model_worker.sampling.masks import stage_masks
from model_worker.sampling.step import MASKED, SamplingStep


class GrammarMasks(SamplingCapability):
    bits = MASKED

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Forbid the ids that masks do not allow, even if nothing is left."""
        staged = stage_masks(self._context.device, step.sample_rows.rows_host, step.masks, logits.shape[1])
        self._context.ops.forbid_masked(logits, staged)
