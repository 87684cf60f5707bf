"""Weight: a parameter that knows which checkpoint tensors fill it. The loader asks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]


class Weight(nn.Parameter):
    """An inference-only parameter, uninitialised until it is loaded.

    What a layer computes with may be a function of what the checkpoint has: `changes`, which keep shape and
    dtype, are applied in order once everything is loaded.

    A packed weight stacks several checkpoint tensors along dimension 0. `parts` maps the checkpoint's module
    names to their sizes there, in order; an empty map means that the checkpoint has the parameter as it is.
    """

    parts: Mapping[str, int]
    changes: Sequence[Change]
    packed: bool  # rearranged in place for a kernel: loading into it, or reading it otherwise, is a mistake

    def __new__(
        cls,
        *shape: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parts: Mapping[str, int] | None = None,
        changes: Sequence[Change] = (),
    ) -> Self:
        weight = super().__new__(cls, torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        weight.parts = parts or {}
        weight.changes = changes
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

    def finish(self) -> None:
        """Make of the checkpoint's values those that are computed with. Once, after the last tensor."""
        for change in self.changes:
            self.data.copy_(change(self.data))


class ExpertWeight(Weight):
    """A weight [num_experts, rows, columns] of which the checkpoint has every expert's part as a matrix."""

    def targets(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Of `a.experts.gate_up_proj` with parts gate_proj and up_proj, the checkpoint has
        `a.experts.0.gate_proj.weight` and so on.
        """
        module = name.rpartition(".")[0]
        for expert in range(self.shape[0]):
            start = 0
            for part, size in self.parts.items():
                yield f"{module}.{expert}.{part}.weight", self.data[expert].narrow(0, start, size)
                start += size
