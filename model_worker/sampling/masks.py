"""Masks of a step, one bit for each id of the vocabulary. Knows no grammar. They stay packed until they are
applied to logits: a row of 152,064 ids is 19 KB, and all rows are one copy.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from runtime.wire.format import LongArray, RowMasks

WORD_BITS = 32


class StepMasks(NamedTuple):
    at: Tensor  # [m] int32: which rows of the logits
    words: Tensor  # [m, ceil(V / 32)] int32: bit i of word j allows id 32 * j + i


def stage_masks(device: Device, rows_host: LongArray, masks: RowMasks, vocab_size: int) -> StepMasks:
    """Return the masks of a step that samples rows_host. A row's first place gets the first of its masks, and
    so on; its last places may have none. Ids beyond the end of a mask are forbidden; bits beyond the
    vocabulary are dropped.
    """
    rows: list[int] = rows_host.tolist()
    assert masks.keys() <= set(rows), "a mask for a row that samples nothing in this step"
    left = {row: iter(masks[row]) for row in masks}
    each = [(at, bits) for at, row in enumerate(rows) if row in left for bits in islice(left[row], 1)]
    num_words = -(-vocab_size // WORD_BITS)
    num_rows, end = len(each), len(each) * num_words
    block = device.host_block(-(-(end + num_rows) // 2))  # of 64 bits
    host = block.numpy().view(np.int32)
    host[end : end + num_rows] = [at for at, _ in each]
    for packed, (_, bits) in zip(host[:end].view(np.uint8).reshape(num_rows, -1), each, strict=True):
        mask = np.frombuffer(bits, np.uint8)[: len(packed)]
        packed[: len(mask)] = mask
        packed[len(mask) :] = 0
    staged = device.upload(block).view(torch.int32)
    return StepMasks(staged[end : end + num_rows], staged[:end].view(num_rows, num_words))


def apply_masks(logits: Tensor, masks: StepMasks) -> None:
    """Set logits [S, V] to -inf in place at ids that a mask does not allow, as the C++ and Triton
    kernels do.
    """
    # Eight ids at a time: a byte of a mask stands for eight booleans, which are a 64-bit number.
    octets = (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1 == 0).view(torch.int64).flatten()
    forbidden = octets.to(logits.device)[masks.words.view(torch.uint8).int()].view(torch.bool)
    at = masks.at.long()
    logits[at] = logits[at].masked_fill_(forbidden[:, : logits.shape[1]], -math.inf)
