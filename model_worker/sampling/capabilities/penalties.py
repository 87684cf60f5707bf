"""Penalties: repetition, presence and frequency penalty, by token counts of a row on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from model_worker.sampling.capabilities.base import SamplingCapability
from model_worker.sampling.columns import IN_PROMPT
from model_worker.sampling.step import SamplingStep, StepSample
from runtime.sampling.features import PENALTY
from runtime.wire.format import unpack_ids
from runtime.wire.plan import RowSetup


class Penalties(SamplingCapability):
    """Applies penalties. counts [max_rows, vocab_size] int32: times sampled, plus IN_PROMPT if the prompt has
    the token.

    Allocated with the first penalty, since most launches never need it. On CUDA the warm-up uses one, so that
    the memory is taken before the KV cache. A token is counted on the stream that samples it.
    """

    bits = remembered = PENALTY
    _counts: Tensor | None = None

    def open_row(self, setup: RowSetup) -> None:
        """Clear the counts of the row's last holder, and count the tokens that this one has."""
        context, tensor = self._context, self._context.device.tensor
        if self._counts is None:
            shape = (context.max_rows, context.vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=context.device.torch_device)
        ids = unpack_ids(setup.history_ids)
        known = context.columns.known(ids)
        in_prompt = np.arange(len(ids)) < setup.num_prompt
        sampled_ids, times = np.unique(ids[known & ~in_prompt], return_counts=True)
        counts = self._counts[setup.row]
        counts.zero_()
        counts[tensor(sampled_ids.astype(np.int64))] = tensor(times.astype(np.int32))
        prompt_ids = tensor(np.unique(ids[known & in_prompt]).astype(np.int64))
        counts[prompt_ids] = counts[prompt_ids] + IN_PROMPT

    @property
    def counts(self) -> Tensor:
        """Counts of all rows. Available once a row was opened."""
        assert self._counts is not None
        return self._counts

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Change logits [S, V] float32 in place, before the draw."""
        self._context.ops.penalise(logits, step.rows_with(PENALTY), self.counts)

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """Count the drawn tokens."""
        self._context.ops.count(self.counts, step.rows_with(PENALTY), sampled.tokens)
