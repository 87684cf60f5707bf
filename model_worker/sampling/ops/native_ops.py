"""NativeSampling: sampling by the C++ kernels, which read the rows' columns directly."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.sample_calls import DrawCall, LogprobsCall, MaskCall, PenaltyCall
from model_worker.sampling.columns import SamplingColumns
from model_worker.sampling.logprobs import Logprobs
from model_worker.sampling.masks import StepMasks
from model_worker.sampling.ops.torch_ops import TorchSampling
from model_worker.sampling.step import SamplingStep, StepRows


class NativeSampling(TorchSampling):
    """Results equal torch's, except for the last bit of an exponential or a logarithm. Those of a row have
    the same bits in any batch and with any number of threads. Small edits use torch.
    """

    def __init__(self, columns: SamplingColumns, device: Device, kernels: NativeKernels) -> None:
        super().__init__(columns, device)
        self._draw, self._logprobs = kernels.draw, kernels.logprobs
        self._penalise, self._mask = kernels.penalise, kernels.mask
        self._columns_at = {"floats": columns.floats.data_ptr(), "integers": columns.integers.data_ptr()}
        self._penalty_call = PenaltyCall(floats=columns.floats.data_ptr())

    def draw(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """Return a token [S] int64 for each row of logits, which are not changed."""
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._draw(self.draw_call(logits, step.sample_rows.rows, step.sample_rows.positions, tokens))
        return tokens

    def draw_call(self, logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor) -> DrawCall:
        """Return the call with which a recorded C++ step draws tokens [S] int64 for table rows and positions
        [S] int64.
        """
        assert logits.is_contiguous()
        num_rows, vocab_size = logits.shape
        return DrawCall(
            logits=logits.data_ptr(),
            rows=rows.data_ptr(),
            positions=positions.data_ptr(),
            tokens=tokens.data_ptr(),
            num_rows=num_rows,
            vocab_size=vocab_size,
            num_threads=torch.get_num_threads(),
            **self._columns_at,
        )

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int, *, ranks: bool = False) -> Logprobs:
        """Return the log-softmax of logits [m, V] at tokens [m] int64 and at the num_top most likely ids;
        with ranks, also the places of the tokens.
        """
        assert logits.is_contiguous()
        num_rows, vocab_size = logits.shape
        num_top = min(num_top, vocab_size)
        chosen = torch.empty(num_rows)
        places = torch.empty(num_rows, dtype=torch.int32) if ranks else None
        top_ids = torch.empty(num_rows, num_top, dtype=torch.int32)
        top = torch.empty(num_rows, num_top)
        self._logprobs(
            LogprobsCall(
                logits=logits.data_ptr(),
                tokens=tokens.data_ptr(),
                chosen=chosen.data_ptr(),
                ranks=None if places is None else places.data_ptr(),
                top_ids=top_ids.data_ptr(),
                top=top.data_ptr(),
                num_rows=num_rows,
                vocab_size=vocab_size,
                num_top=num_top,
                num_threads=torch.get_num_threads(),
            )
        )
        return Logprobs(chosen, top_ids, top, places)

    def penalise(self, logits: Tensor, penalised: StepRows, counts: Tensor) -> None:
        """Apply the penalties of these rows. counts [max_rows, V] int32: see Penalties."""
        assert logits.is_contiguous()
        assert counts.is_contiguous()
        call = self._penalty_call
        call.logits = logits.data_ptr()
        call.rows, call.table_rows = penalised.at.data_ptr(), penalised.rows.data_ptr()
        call.counts = counts.data_ptr()
        call.num_rows, call.vocab_size = len(penalised), logits.shape[1]
        call.num_threads = torch.get_num_threads()
        self._penalise(call)

    def forbid_masked(self, logits: Tensor, masks: StepMasks) -> None:
        """Forbid the ids that a mask does not allow."""
        assert logits.is_contiguous()
        num_rows, num_words = masks.words.shape
        self._mask(
            MaskCall(
                logits=logits.data_ptr(),
                rows=masks.at.data_ptr(),
                words=masks.words.data_ptr(),
                num_rows=num_rows,
                vocab_size=logits.shape[1],
                num_words=num_words,
                num_threads=torch.get_num_threads(),
            )
        )
