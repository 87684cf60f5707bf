"""NativeDraw: tokens by the C++ kernel, for rows that are greedy or draw from the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.kernels.native.library import DrawCall, NativeKernels
from model_worker.sampling import columns as col
from model_worker.sampling.columns import SampleRows, SamplingColumns


class NativeDraw:
    """The same tokens as torch's operations give, for a margin in the last bit of a logarithm."""

    def __init__(self, kernels: NativeKernels, columns: SamplingColumns, vocab_size: int) -> None:
        self._kept = columns
        self._run = kernels.draw
        self._call = DrawCall(
            temperature=columns.temperature.data_ptr(),
            min_logit_gap=columns.min_logit_gap.data_ptr(),
            seed=columns.seed.data_ptr(),
            features=columns.features.ctypes.data,
            draw_bits=col.NOISE,
            skip_bits=col.TOP_K | col.TOP_P,
            vocab_size=vocab_size,
            float_stride=columns.temperature.stride(0),
            integer_stride=columns.seed.stride(0),
        )

    def __call__(self, logits: Tensor, who: SampleRows) -> Tensor:
        """logits [S, V] float32 -> tokens [S] int64; those of rows with top-k or top-p are not set."""
        assert logits.is_contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64)
        call = self._call
        call.logits = logits.data_ptr()
        call.rows = who.rows.data_ptr()
        call.positions = who.positions.data_ptr()
        call.tokens = tokens.data_ptr()
        call.num_rows = len(tokens)
        call.num_threads = torch.get_num_threads()
        self._run(call)
        return tokens
