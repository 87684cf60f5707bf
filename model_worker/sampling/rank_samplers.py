"""Samplers of tensor-parallel ranks. Rank 0 samples, and sends its tokens to all ranks. The others need no
sampling parameters: they receive tokens in stream order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.distributed.group import RankGroup
from model_worker.kernels.native.library import NativeKernels
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.logprobs import Logprobs, logprobs_of
from model_worker.sampling.processors.runner import ProcessorRunner
from model_worker.sampling.sampler import Sampler
from model_worker.sampling.step import StepSample
from runtime.wire.format import RowMasks
from runtime.wire.plan import RowSetup


class LeadingSampler(Sampler):
    """Sampler of rank 0, which sends its tokens to the others."""

    def __init__(
        self,
        group: RankGroup,
        device: Device,
        *,
        max_rows: int,
        max_len: int,
        vocab_size: int,
        kernels: NativeKernels | None,
        processors: ProcessorRunner | None,
    ) -> None:
        super().__init__(
            device,
            max_rows=max_rows,
            max_len=max_len,
            vocab_size=vocab_size,
            kernels=kernels,
            processors=processors,
        )
        self._group = group

    def sample(self, logits: Tensor, sample_rows: SampleRows, masks: RowMasks) -> StepSample:
        """Sample one token for each of S rows, and send them; see Sampler."""
        sampled = super().sample(logits, sample_rows, masks)
        sampled.tokens = self._group.broadcast(sampled.tokens.contiguous())
        return sampled


class FollowingSampler:
    """Sampler of any other rank, which receives rank 0's tokens."""

    def __init__(self, group: RankGroup, processors: ProcessorRunner | None) -> None:
        self._group = group
        self._processors = processors

    def open_rows(self, setups: Sequence[RowSetup]) -> None:
        """Record new holders for logits processors only, since rank 0 samples."""
        if self._processors is not None:
            for setup in setups:
                self._processors.open_row(setup)

    def sample(self, logits: Tensor, sample_rows: SampleRows, masks: RowMasks) -> StepSample:
        """Return rank 0's tokens, without its other results."""
        if self._processors is not None:
            self._processors.run(logits, sample_rows.rows_host)
        tokens = torch.empty(len(sample_rows.rows_host), dtype=torch.int64, device=logits.device)
        return StepSample(self._group.broadcast(tokens))

    def prompt_logprobs_of(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """Return log-probabilities of prompt positions: empty, because only rank 0 has their logits."""
        return logprobs_of(logits, tokens, num_top, ranks=True)


def make_sampler(
    group: RankGroup,
    device: Device,
    *,
    max_rows: int,
    max_len: int,
    vocab_size: int,
    kernels: NativeKernels | None = None,
    processors: ProcessorRunner | None = None,
    has_logits: bool = True,
) -> Sampler | FollowingSampler:
    """Make the sampler of this rank of the group. max_len: most tokens of a sequence. processors: logits
    processors that this rank calls. has_logits: True if these ranks have the head, rather than another
    pipeline stage.
    """
    if group.rank > 0 or not has_logits:
        return FollowingSampler(group, processors)
    options: dict[str, Any] = {
        "max_rows": max_rows,
        "max_len": max_len,
        "vocab_size": vocab_size,
        "kernels": kernels,
        "processors": processors,
    }
    return LeadingSampler(group, device, **options) if group.size > 1 else Sampler(device, **options)
