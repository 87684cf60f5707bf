"""The samplers of tensor-parallel ranks: rank 0 samples, and its tokens are everybody's.

The others need no column of a row: what they sample is what they are told, in the order of the stream.
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
    """Rank 0's: a Sampler that tells the others."""

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

    def sample(self, logits: Tensor, who: SampleRows, masks: RowMasks) -> StepSample:
        """Sample one token for each of S rows. See Sampler."""
        sampled = super().sample(logits, who, masks)
        sampled.tokens = self._group.broadcast(sampled.tokens.contiguous())
        return sampled


class FollowingSampler:
    """Any other rank's."""

    def __init__(self, group: RankGroup, processors: ProcessorRunner | None) -> None:
        self._group = group
        self._processors = processors

    def open_rows(self, setups: Sequence[RowSetup]) -> None:
        """Rank 0 knows how a row is sampled; processors may be every rank's."""
        if self._processors is not None:
            for setup in setups:
                self._processors.open_row(setup)

    def sample(self, logits: Tensor, who: SampleRows, masks: RowMasks) -> StepSample:
        """Rank 0's tokens, and nothing else of what it has sampled."""
        if self._processors is not None:
            self._processors.run(logits, who.rows_host)
        tokens = torch.empty(len(who.rows_host), dtype=torch.int64, device=logits.device)
        return StepSample(self._group.broadcast(tokens))

    def logprobs_of(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """Log-probabilities of prompt positions; rank 0 has their logits, and no other."""
        return logprobs_of(logits, tokens, num_top)


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
    """Make the sampler of this rank of the group; max_len: tokens of the longest sequence; processors: those
    that this rank calls. has_logits: the ranks have the head, and not another pipeline stage's.
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
