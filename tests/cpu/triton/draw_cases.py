"""Batches for a draw that are hard to cut: logits, and rows that are cut in every way."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.harness.row_setups import Row

KINDS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 1},
    {"temperature": 1.3, "top_k": 50},
    {"top_k": 10**6, "top_p": 1e-6},
    {"top_p": 0.9},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 700, "top_p": 0.5, "min_p": 0.02},
    {"temperature": 2.0, "top_p": 1.0 - 2.0**-24, "min_p": 1e-4},
    {"min_p": 0.2},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.1},
    {"temperature": 1e-4, "top_k": 1999},
    {"top_n_sigma": 1.0},
    {"temperature": 1.6, "top_n_sigma": 2.0, "top_k": 1500},
    {"temperature": 0.7, "top_n_sigma": 0.3, "top_p": 0.6, "min_p": 0.02},
    {"temperature": 0.0, "top_n_sigma": 1.0},
]
SETUPS = [Row(row=row, num_prompt=4, seed=91 + row, **kind) for row, kind in enumerate(KINDS)]  # type: ignore[arg-type]


def _normal(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda noise: scale * noise


def _with_holes(noise: Tensor) -> Tensor:
    """Most forbidden, and of some rows all but a few."""
    logits = (3.0 * noise).masked_fill(noise < 0.5, -math.inf)
    logits[::2, 10:] = -math.inf
    logits[::2, 3] = 1.0
    return logits


def _of_zeros(noise: Tensor) -> Tensor:
    """0.0 and -0.0 are the same, and half of all."""
    logits = noise.clamp_max(0.0)
    logits[:, ::3] = -0.0
    return logits


def _one_hot(noise: Tensor) -> Tensor:
    logits = torch.zeros_like(noise)
    logits[:, noise.shape[1] // 2] = 60.0
    return logits


def _far_apart(noise: Tensor) -> Tensor:
    return noise * 1e30


def _infinite(noise: Tensor) -> Tensor:
    return (3.0 * noise).masked_fill(noise > 3.0, math.inf)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "peaked": _normal(4.0),
    "flat": _normal(0.01),
    "many equal": lambda noise: (4.0 * noise / 1.5).round() * 1.5,
    "all equal": lambda noise: noise * 0.0 + 7.0,
    "none allowed": lambda noise: noise * 0.0 - math.inf,
    "holes": _with_holes,
    "zeros": _of_zeros,
    "one hot": _one_hot,
    "far apart": _far_apart,
    "infinite": _infinite,
}


def logits_of(case: str, vocab_size: int) -> Tensor:
    """[len(KINDS), vocab_size] float32."""
    generator = torch.Generator().manual_seed(vocab_size)
    return CASES[case](torch.randn(len(KINDS), vocab_size, generator=generator))
