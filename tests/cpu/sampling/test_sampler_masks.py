"""Masks by torch and by C++, bit by bit; test_sampler.py says what they mean for a draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_worker.sampling.masks import apply_masks, stage_masks
from model_worker.sampling.ops.native_ops import NativeSampling
from tests.harness.models.mask_cases import VOCABS, mask_case
from tests.harness.models.native import needs_compiler
from tests.harness.models.sampler_driver import CPU, LeastDevice, NativeDevice, sampler_with, setup


@pytest.mark.parametrize("vocab", VOCABS)
def test_masks_by_torch(vocab: int) -> None:
    logits, staged, expected = mask_case(vocab)
    apply_masks(logits, staged)
    torch.testing.assert_close(logits, expected, atol=0.0, rtol=0.0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("device", [NativeDevice, LeastDevice])
def test_masks_by_cpp(vocab: int, device: type[NativeDevice]) -> None:
    native = sampler_with(device(threaded=False), setup(0), vocab=vocab).ops
    assert isinstance(native, NativeSampling)
    logits, staged, expected = mask_case(vocab)
    native.forbid_masked(logits, staged)
    torch.testing.assert_close(logits, expected, atol=0.0, rtol=0.0, equal_nan=True)


def test_a_mask_of_a_row_that_is_not_sampled_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="samples nothing"):
        stage_masks(CPU, np.array([4, 2]), {4: [b"\xff"], 3: [b"\xff"]}, 8)
