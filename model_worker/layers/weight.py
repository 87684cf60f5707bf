"""Weight: a parameter that knows which checkpoint tensors fill it. The loader asks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

import torch
from torch import Tensor, nn


class Weight(nn.Parameter):
    """An inference-only parameter, uninitialised until it is loaded.

    A packed weight stacks several checkpoint tensors along dimension 0. `parts` maps the checkpoint's module
    names to their sizes there, in order; an empty map means that the checkpoint has the parameter as it is.
    """

    parts: Mapping[str, int]
    packed: bool  # rearranged in place for a kernel: loading into it, or reading it otherwise, is a mistake

    def __new__(
        cls,
        *shape: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parts: Mapping[str, int] | None = None,
    ) -> Self:
        weight = super().__new__(cls, torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        weight.parts = parts or {}
        weight.packed = False
        return weight

    def targets(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, the view of this weight which that tensor fills).

        name is the parameter's own: of `a.qkv_proj.weight` with parts q_proj and k_proj, the checkpoint has
        `a.q_proj.weight` and `a.k_proj.weight`.
        """
        assert not self.packed, f"{name} is packed: it can no longer be loaded"
        if not self.parts:
            yield name, self.data
            return
        module, _, kind = name.rpartition(".")
        parent = module.rpartition(".")[0]
        start = 0
        for part, size in self.parts.items():
            yield f"{parent}.{part}.{kind}", self.data.narrow(0, start, size)
            start += size
