"""LogitsProcessors: capability that calls the launch's own logits processors, before anything else changes
the logits.
"""

from __future__ import annotations

from torch import Tensor

from model_worker.sampling.capabilities.base import SamplingCapability
from model_worker.sampling.processors.runner import ProcessorRunner
from model_worker.sampling.step import SamplingStep, StepSample
from runtime.sampling.features import PROCESSED
from runtime.wire.plan import RowSetup


class LogitsProcessors(SamplingCapability):
    bits = remembered = PROCESSED

    @property
    def _runner(self) -> ProcessorRunner:
        runner = self._context.processors
        assert runner is not None, "a row with processors where the launch has none"
        return runner

    def open_row(self, setup: RowSetup) -> None:
        """Store the row's tokens, and what its processors get."""
        self._runner.open_row(setup)

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Call the processors."""
        self._made = self._runner.run(logits, step.sample_rows.rows_host)

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """Report processors that failed, and the scores for beam searches."""
        made = self._made
        sampled.errors, sampled.scores, sampled.scores_of = made.errors, made.scores, made.scores_of
        del self._made
