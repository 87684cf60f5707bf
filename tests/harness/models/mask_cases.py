"""Masks of rows between other rows, and the expected logits, computed by numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_worker.sampling.masks import StepMasks, stage_masks
from tests.harness.models.sampler_driver import CPU, one_each, random_logits

VOCABS = (1, 7, 32, 63, 1003, 4096, 5001)


class MaskCase(NamedTuple):
    logits: Tensor  # [S, V]
    staged: StepMasks
    expected: Tensor  # [S, V]


def mask_case(vocab: int) -> MaskCase:
    """Random, full, empty, short and long masks, and rows without any; one row's logits are strange."""
    rng = np.random.default_rng(vocab)
    num_bytes = 4 * -(-vocab // 32)
    random = [rng.integers(0, 256, num_bytes, np.uint8).tobytes() for _ in range(3)]
    short, long = random[0][: num_bytes // 2], random[1] + b"\xff" * 8
    masks = {9: random[2], 3: b"\xff" * num_bytes, 0: bytes(num_bytes), 7: short, 2: long, 5: b""}
    rows = np.array([9, 1, 3, 0, 8, 7, 2, 5])
    logits = random_logits(len(rows), vocab=vocab)
    logits[0, ::3], logits[0, 1::3] = torch.nan, torch.inf
    expected = logits.clone()
    for i, row in enumerate(rows.tolist()):
        if row in masks:
            mask = np.frombuffer(masks[row].ljust(num_bytes, b"\0"), np.uint8)
            bits = np.unpackbits(mask, bitorder="little", count=vocab)
            expected[i, torch.from_numpy(bits == 0)] = -torch.inf
    return MaskCase(logits, stage_masks(CPU, rows, one_each(masks), vocab), expected)
