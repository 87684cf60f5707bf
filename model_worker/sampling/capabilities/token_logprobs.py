"""LogprobsCapability: log-probabilities of sampled tokens in the model's own distribution."""

from __future__ import annotations

from torch import Tensor

from model_worker.sampling.capabilities.base import SamplingCapability
from model_worker.sampling.step import CHANGES, SamplingStep, StepSample
from runtime.sampling.features import LOGPROBS


class LogprobsCapability(SamplingCapability):
    bits = remembered = LOGPROBS

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Keep a copy of logits that are about to be changed."""
        asked = step.rows_with(LOGPROBS)
        stays = not step.present & CHANGES and len(asked) == len(step)
        self._raw = logits if stays else logits[asked.at]

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """Add the tokens' log-probabilities and the largest ones to the result."""
        asked = step.rows_with(LOGPROBS)
        num_top = int(self._context.columns.host["num_logprobs"][asked.rows_host].max())
        sampled.logprobs = self._context.ops.logprobs(self._raw, sampled.tokens[asked.at], num_top)
        sampled.logprobs_of = asked.index
        del self._raw
