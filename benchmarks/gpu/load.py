"""Requests of a load: random token ids with given lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.shapes import SHAPES


@dataclass(frozen=True)
class Load:
    num_requests: int
    input_len: int  # tokens of each
    output_len: int

    def prompts(self, name: str, seed: int) -> list[list[int]]:
        """Return prompts of token ids in the shape's vocabulary."""
        vocab_size = SHAPES[name]["vocab_size"]
        rng = np.random.default_rng(seed)
        ids: list[list[int]] = rng.integers(0, vocab_size, (self.num_requests, self.input_len)).tolist()
        return ids
