"""Logprobs and raw logits of prompt positions that a plan asks for. Knows hidden states, no request. The head
is applied to blocks of positions, however many a chunk has, so that the device only needs memory for one
block of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling.logprobs import Logprobs
from runtime.wire.format import TOKEN_BYTES, unpack_ids
from runtime.wire.plan import PromptPositions

# Bytes of the logits of a block. Small beside a model, but large enough that reading the head's weight for
# each block costs little: 55 positions of a vocabulary of 152,000. Otherwise arbitrary.
BLOCK_BYTES = 32 << 20
FLOAT_BYTES = 4


@dataclass(slots=True)
class PromptLogits:
    """Raw logits of some positions of one entry's row, on the host once the step is done."""

    entry: int
    first: int  # which of the entry's positions
    logits: Tensor  # [n, V] float32


@dataclass(slots=True)
class PromptOutput:
    """Results for P positions, entry by entry."""

    logprobs: Logprobs | None  # [P], when an entry asked
    logits: list[PromptLogits]


def num_positions(entry: PromptPositions) -> int:
    return len(entry.targets) // TOKEN_BYTES


def score_prompt_positions(
    entries: Sequence[PromptPositions],
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    logprobs_of: Callable[[Tensor, Tensor, int], Logprobs],
    vocab_size: int,
    device: Device,
) -> PromptOutput:
    """Return what the entries ask for, from the final hidden states [P, hidden_size] of their positions.
    Returns nothing on a rank other than 0, whose logits have no rows.
    """
    ends = np.cumsum([num_positions(entry) for entry in entries]).tolist()
    assert ends[-1] == hidden.shape[0]
    num_top = max(entry.num_logprobs for entry in entries)
    if num_top < 0 and not any(entry.returns_logits for entry in entries):
        return PromptOutput(None, [])
    targets: Tensor | None = None
    if num_top >= 0:
        ids = np.concatenate([unpack_ids(entry.targets) for entry in entries])
        targets = device.tensor(ids.astype(np.int64))
    scored: list[Logprobs] = []
    kept: list[PromptLogits] = []
    block = max(1, BLOCK_BYTES // (FLOAT_BYTES * vocab_size))
    for begin in range(0, hidden.shape[0], block):
        logits = compute_logits(hidden[begin : begin + block])
        if not len(logits):
            continue  # computed all the same: rank 0 needs this rank's part of each block
        if targets is not None:
            scored.append(logprobs_of(logits, targets[begin : begin + block], num_top))
        for n, (entry, end) in enumerate(zip(entries, ends, strict=True)):
            start = end - num_positions(entry)
            low, high = max(begin, start), min(begin + block, end)
            if entry.returns_logits and low < high:
                # Downloaded at once, on the stream that computes, because a chunk's logits may not fit the
                # device together.
                part = device.download(logits[low - begin : high - begin])
                kept.append(PromptLogits(n, low - start, part))
    return PromptOutput(_joined(scored) if scored else None, kept)


def _joined(parts: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(*map(torch.cat, zip(*(part.parts for part in parts), strict=True)))
