"""Sampler: one token for each row of logits, in the order of docs/sampling.md.

    logits processors
    → repetition → presence, frequency → logit bias → allowed ids, mask → min tokens, bad words, n-grams
    → ÷ temperature → top-n-sigma → top-k → top-p → min-p
    → argmax(logit + Gumbel noise of (seed, position, id))

The draw begins with the temperature (`ops/`). Each part of the first two lines is an object (`capabilities/`,
`processors/`), and so is each report beside a token; the sampler knows none of them. The place of a part that
forbids ids does not matter; parts that may yield come last, because they must see which ids are left. A step
touches only the rows that need a capability; a batch of plain greedy rows is one argmax. A row's token
depends on its own logits, parameters, history and position, never on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from model_worker.device.base import Device
from model_worker.kernels.native.library import NativeKernels
from model_worker.sampling.capabilities.base import SamplerContext
from model_worker.sampling.capabilities.table import CAPABILITIES
from model_worker.sampling.columns import SampleRows, SamplingColumns
from model_worker.sampling.logprobs import Logprobs
from model_worker.sampling.ops.base import DrawKind
from model_worker.sampling.ops.selection import make_sampling_ops
from model_worker.sampling.processors.runner import ProcessorRunner
from model_worker.sampling.step import SamplingStep, StepSample
from model_worker.sampling.verification import looks_back, sample_in_turns
from runtime.sampling.features import DRAWABLE, TRUNCATES
from runtime.wire.format import LongArray, RowMasks
from runtime.wire.plan import RowSetup


class Sampler:
    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_len: int,
        vocab_size: int,
        kernels: NativeKernels | None = None,
        processors: ProcessorRunner | None = None,
    ) -> None:
        """max_len: most tokens of a sequence, prompt and output. kernels: C++ kernels for sampling on a CPU.
        processors: logits processors of the launch.
        """
        self._device = device
        self._columns = SamplingColumns(max_rows, vocab_size, device)
        self.ops = make_sampling_ops(self._columns, device, kernels)
        context = SamplerContext(
            device,
            self._columns,
            self.ops,
            max_rows=max_rows,
            max_len=max_len,
            vocab_size=vocab_size,
            processors=processors,
        )
        self._capabilities = tuple(make(context) for make in CAPABILITIES)

    def open_rows(self, setups: Sequence[RowSetup]) -> None:
        """Set the parameters of rows with new holders."""
        features = self._columns.features
        for setup in setups:
            for capability in self._capabilities:
                if features.item(setup.row) & capability.bits:
                    capability.close_row(setup.row)
        self._columns.open_rows(setups)
        for setup in setups:
            for capability in self._capabilities:
                if features.item(setup.row) & capability.bits:
                    capability.open_row(setup)

    def sample(self, logits: Tensor, sample_rows: SampleRows, masks: RowMasks) -> StepSample:
        """Sample one token for each of S rows. logits [S, V] float32 are overwritten. masks: bitmasks by row,
        one for each of its places; bit i of int32 word j allows id 32 * j + i. With guesses, the tokens
        behind a wrong guess, and their reports, are meaningless.
        """
        if sample_rows.guesses is not None and looks_back(self._columns.features, sample_rows):
            return sample_in_turns(self._sample, logits, sample_rows, masks, self._device)
        return self._sample(logits, sample_rows, masks)

    def _sample(self, logits: Tensor, sample_rows: SampleRows, masks: RowMasks) -> StepSample:
        step = SamplingStep(self._device, sample_rows, self._columns.features[sample_rows.rows_host], masks)
        # Most steps need a draw and nothing else.
        wanted = self._capabilities if step.present & ~DRAWABLE else ()
        for capability in wanted:
            if step.present & capability.bits:
                capability.apply(logits, step)
        sampled = StepSample(self.ops.draw(logits, step))
        for capability in wanted:
            if step.present & capability.remembered:
                capability.remember(step, sampled)
        return sampled

    def prompt_logprobs_of(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """Return the log-softmax of logits [m, V] float32 at tokens [m] int64 of prompts and at the num_top
        most likely ids, and the places of the tokens.
        """
        return self.ops.logprobs(logits, tokens, num_top, ranks=True)

    def draw_kind(self, rows_host: LongArray) -> DrawKind | None:
        """Return the kind of draw for these rows; None if they need more than a draw."""
        present = int(np.bitwise_or.reduce(self._columns.features[rows_host], initial=0))
        if present & ~DRAWABLE:
            return None
        return DrawKind.TRUNCATED if present & TRUNCATES else DrawKind.WHOLE
