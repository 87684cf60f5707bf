"""PenaltyCounts: which tokens a row's context holds and how often they were sampled, on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling.columns import IN_PROMPT, SamplingColumns
from runtime.wire.format import IntArray


class PenaltyCounts:
    """counts [max_rows, vocab_size] int32: times sampled, plus IN_PROMPT where the prompt holds the token.

    Allocated with the first penalty: most runs never need it. On CUDA the warm-up is the first, so that this
    memory is not looked for behind the KV cache. A token is counted on the stream that samples
    it, so the next step sees it whether or not the host does.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        self._shape = (max_rows, vocab_size)
        self._device = device
        self._counts: Tensor | None = None

    def open_row(self, row: int, prompt_ids: IntArray, output_ids: IntArray) -> None:
        """Begin a stay: forget the row's last tenant and count what this one has already."""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device.torch_device)
        ids, times = np.unique(output_ids, return_counts=True)
        counts = self._counts[row]
        counts.zero_()
        counts[self._device.tensor(ids.astype(np.int64))] = self._device.tensor(times.astype(np.int32))
        in_prompt = self._device.tensor(np.unique(prompt_ids).astype(np.int64))
        counts[in_prompt] = counts[in_prompt] + IN_PROMPT

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count one sampled token for each of rows [n], which differ; both int64."""
        self.counts[rows, tokens] = self.counts[rows, tokens] + 1

    @property
    def counts(self) -> Tensor:
        """The table, once a row was opened."""
        assert self._counts is not None
        return self._counts

    def add_by_kernel(self, rows: Tensor, tokens: Tensor, columns: SamplingColumns) -> None:
        """`add` for those of rows [S] that have a penalty by their columns, in one launch."""
        # Imported where a GPU is used, and only there: a CPU needs no triton.
        from model_worker.sampling.triton.logit_edits import count_tokens

        assert self._counts is not None
        count_tokens(self._counts, rows, tokens, columns)

    def apply_by_kernel(self, logits: Tensor, rows: Tensor, columns: SamplingColumns) -> None:
        """`apply` to logits [S, V] with the penalties of the rows' columns, in one launch."""
        from model_worker.sampling.triton.logit_edits import penalize

        assert self._counts is not None
        penalize(logits, rows, self._counts, columns)

    def apply(
        self, logits: Tensor, rows: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> None:
        """Penalise logits [n, V] in place, for rows [n] int64 with penalties [n] float32.

        Repetition divides positive logits of tokens in prompt or output and multiplies negative ones;
        presence and frequency look at the output alone.
        """
        counts = self.counts[rows]
        repetition = repetition.unsqueeze(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        torch.where(counts != 0, repeated, logits, out=logits)
        times = (counts & (IN_PROMPT - 1)).float()
        logits -= frequency.unsqueeze(1) * times
        logits -= presence.unsqueeze(1) * (times > 0)
