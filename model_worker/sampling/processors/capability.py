"""LogitsProcessors: the launch's own code, before anything else changes the logits."""

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
        """Keep its tokens, and what its processors are told."""
        self._runner.open_row(setup)

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Call them."""
        self._made = self._runner.run(logits, step.who.rows_host)

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """Report what has failed, and the scores that beam searches read."""
        made = self._made
        sampled.errors, sampled.scores, sampled.scores_of = made.errors, made.scores, made.scores_of
        del self._made
