"""EmbeddingRunner: a ModelRunner whose steps end in vectors, not in tokens. Its model needs no head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from model_worker.runner.model_runner import ModelRunner
from model_worker.runner.pooler import Pooler
from model_worker.runner.step_output import StepOutput, sampled_positions
from runtime.checkpoint.pooling import Pooling
from runtime.wire.plan import BatchPlan


class EmbeddingRunner(ModelRunner):
    """Where a plan samples a row, its sequence is complete: it has its vector, and a 0 for a token."""

    def __init__(self, *args: Any, pooling: Pooling, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pooler = Pooler(pooling, max_rows=self.max_rows, device=self._device)

    @torch.inference_mode()
    def forward(self, plan: BatchPlan) -> StepOutput:
        """Apply the plan and compute its tokens."""
        batch, _ = self.apply(plan)
        if self._pooler.needs_every_token:
            batch = replace(batch, output_indices=None)
        self._backend.prepare(batch)
        hidden = self._model(batch, self.kv_pool, self._backend)
        complete, _ = sampled_positions(plan)
        vectors = self._pooler.pool(hidden, batch, complete)
        tokens = torch.zeros(len(vectors), dtype=torch.int32, device=vectors.device)
        return StepOutput(tokens, embeddings=vectors)

    def _record(self, decode: BatchPlan, on_progress: Callable[[], None]) -> None:
        """A recording ends in logits, and of a prompt there is one step."""
