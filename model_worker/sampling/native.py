"""Draws, log-probabilities and penalties by the C++ kernels, straight from the rows' columns."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.sample_calls import DrawCall, LogprobsCall, MaskCall, PenaltyCall
from model_worker.sampling.columns import SampleRows, SamplingColumns
from model_worker.sampling.logprobs import Logprobs
from model_worker.sampling.masks import StepMasks


class NativeSampling:
    """What torch gives, but for a margin in the last bit of an exponential or a logarithm. Results of a row
    are the same bits in any batch and with any number of threads.
    """

    def __init__(self, kernels: NativeKernels, columns: SamplingColumns, vocab_size: int) -> None:
        self._kept = columns
        self.features = columns.features
        self._draw, self._penalise, self._mask = kernels.draw, kernels.penalise, kernels.mask
        self._columns_at = {"floats": columns.floats.data_ptr(), "integers": columns.integers.data_ptr()}
        self._vocab_size = vocab_size
        self._penalty_call = PenaltyCall(floats=columns.floats.data_ptr(), vocab_size=vocab_size)

    def draw(self, logits: Tensor, who: SampleRows) -> Tensor:
        """A token [S] int64 for each row of logits [S, V] float32, which stay as they are."""
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._draw(self.call_for(logits, who.rows, who.positions, tokens))
        return tokens

    def call_for(self, logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor) -> DrawCall:
        """The call that draws tokens [S] int64 for table rows and positions [S], int64."""
        assert logits.is_contiguous()
        return DrawCall(
            logits=logits.data_ptr(),
            rows=rows.data_ptr(),
            positions=positions.data_ptr(),
            tokens=tokens.data_ptr(),
            num_rows=logits.shape[0],
            vocab_size=self._vocab_size,
            num_threads=torch.get_num_threads(),
            **self._columns_at,
        )

    def penalise(self, logits: Tensor, at: Tensor, rows: Tensor, counts: Tensor) -> None:
        """PenaltyCounts.apply for rows `at` [n] of logits [S, V]; counts [max_rows, V] int32 of rows [n]."""
        assert logits.is_contiguous()
        assert counts.is_contiguous()
        call = self._penalty_call
        call.logits = logits.data_ptr()
        call.rows, call.table_rows = at.data_ptr(), rows.data_ptr()
        call.counts = counts.data_ptr()
        call.num_rows = at.shape[0]
        call.num_threads = torch.get_num_threads()
        self._penalise(call)

    def forbid_masked(self, logits: Tensor, masks: StepMasks) -> None:
        """apply_masks over logits [S, V]."""
        assert logits.is_contiguous()
        num_rows, num_words = masks.words.shape
        self._mask(
            MaskCall(
                logits=logits.data_ptr(),
                rows=masks.at.data_ptr(),
                words=masks.words.data_ptr(),
                num_rows=num_rows,
                vocab_size=self._vocab_size,
                num_words=num_words,
                num_threads=torch.get_num_threads(),
            )
        )


class NativeLogprobs:
    """logprobs_of by the C++ kernel."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._run = kernels.logprobs

    def __call__(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """See logprobs_of."""
        assert logits.is_contiguous()
        num_rows, vocab_size = logits.shape
        num_top = min(num_top, vocab_size)
        chosen = torch.empty(num_rows)
        top_ids = torch.empty(num_rows, num_top, dtype=torch.int32)
        top = torch.empty(num_rows, num_top)
        self._run(
            LogprobsCall(
                logits=logits.data_ptr(),
                tokens=tokens.data_ptr(),
                chosen=chosen.data_ptr(),
                top_ids=top_ids.data_ptr(),
                top=top.data_ptr(),
                num_rows=num_rows,
                vocab_size=vocab_size,
                num_top=num_top,
                num_threads=torch.get_num_threads(),
            )
        )
        return Logprobs(chosen, top_ids, top)
