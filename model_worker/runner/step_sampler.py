"""StepSampler: second half of a step, from logits to tokens, which the tables keep for the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model_worker.device.base import Device
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.ops.base import Ops
from model_worker.runner.step_output import ForwardOutput, StepOutput
from model_worker.runner.step_tables import StepTables
from model_worker.sampling.processors.runner import ProcessorRunner
from model_worker.sampling.rank_samplers import make_sampler
from model_worker.sampling.sampler import Sampler
from runtime.wire.format import RowMasks
from runtime.wire.plan import ProcessedRow


class StepSampler:
    """Samples steps. The rank that has logits samples; the others receive its tokens."""

    def __init__(
        self,
        ops: Ops,
        device: Device,
        tables: StepTables,
        *,
        vocab_size: int,
        group: RankGroup = SOLO,
        processors: ProcessorRunner | None = None,
        has_logits: bool = True,
    ) -> None:
        """group: ranks of the model. processors: logits processors that this rank calls. has_logits: as in
        make_sampler.
        """
        self._sampler = make_sampler(
            group,
            device,
            max_rows=tables.max_rows,
            max_len=tables.max_len,
            vocab_size=vocab_size,
            kernels=ops.sampling_kernels,
            processors=processors,
            has_logits=has_logits,
        )
        self._tables = tables
        self._group = group
        self._processors = processors
        self.open_rows = self._sampler.open_rows
        self.prompt_logprobs_of = self._sampler.prompt_logprobs_of

    @property
    def own(self) -> Sampler | None:
        """Sampler of this rank; None if another rank samples."""
        return self._sampler if isinstance(self._sampler, Sampler) else None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that compute the model together."""
        return self._group.size

    @property
    def is_first_rank(self) -> bool:
        """True on rank 0, which returns outputs that are not sampled, such as additional outputs."""
        return self._group.rank == 0

    def sample(
        self,
        forward: ForwardOutput | StepOutput,
        masks: RowMasks,
        processed: Sequence[ProcessedRow] = (),
    ) -> StepOutput:
        """Sample the step's tokens, and store them for plans that contain -1. processed: see SampleMasks."""
        if processed and self._processors is not None:
            self._processors.expect(processed)
        if isinstance(forward, StepOutput):
            return forward
        if forward.tokens is not None:
            assert not masks, "masks for a step whose sampling was not deferred"
            return StepOutput(forward.tokens)
        return self._sample(forward, masks)

    @torch.inference_mode()
    def _sample(self, forward: ForwardOutput, masks: RowMasks) -> StepOutput:
        tokens = None if forward.draw is None or masks else forward.draw()
        if tokens is not None:
            tokens = self._group.broadcast(tokens)
            if forward.sample_rows.guesses is not None:
                self._tables.remember(forward.sample_rows, tokens)
            return StepOutput(tokens.int())
        sampled = self._sampler.sample(forward.logits, forward.sample_rows, masks)
        self._tables.remember(forward.sample_rows, sampled.tokens)
        return StepOutput(
            sampled.tokens.int(),
            sampled.logprobs,
            sampled.logprobs_of,
            sampled.logits,
            sampled.logits_of,
            sampled.scores,
            sampled.scores_of,
            forward.prompt,
            errors=sampled.errors,
            tapped=forward.tapped,
        )
