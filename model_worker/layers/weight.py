"""Weight: a parameter that knows which checkpoint tensors fill which parts of it. The loader asks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from model_worker.distributed.cut import Cut, whole

Change = Callable[[Tensor], Tensor]


class Piece(NamedTuple):
    """Part of a weight's memory, and the part of a checkpoint tensor that fills it."""

    shape: tuple[int, ...]  # of the whole checkpoint tensor
    where: tuple[slice, ...]  # the part of it, one slice for each dimension
    memory: Tensor  # of the part's shape


class Weight(nn.Parameter):
    """An inference-only parameter, uninitialised until it is loaded.

    A dimension given as a Cut holds a rank's part of the checkpoint's; room beyond the part is zero.

    The weight of a layer may be a function of the checkpoint's: `changes`, which keep shape and dtype, are
    applied in order once everything is loaded.

    A packed weight stacks several checkpoint tensors along dimension 0. `parts` maps the checkpoint's module
    names to their cuts there, in order; an empty map means that the checkpoint has the parameter as it is.
    With `one_tensor` the checkpoint has stacked them too, in the same order, in one tensor of the parameter's
    name.
    """

    parts: Mapping[str, Cut]
    cuts: tuple[Cut, ...]  # of dimension 0 where there are no parts, and of the dimensions behind it
    one_tensor: bool
    changes: Sequence[Change]
    packed: bool  # rearranged in place for a kernel: loading into it, or reading it otherwise, is a mistake
    row_scale: Tensor | None  # of rows in int8, float32: of a head, which an embedding may share

    def __new__(
        cls,
        *shape: int | Cut,
        dtype: torch.dtype,
        device: torch.device | str,
        parts: Mapping[str, Cut] | None = None,
        one_tensor: bool = False,
        changes: Sequence[Change] = (),
    ) -> Self:
        cuts = tuple(size if isinstance(size, Cut) else whole(size) for size in shape)
        data = torch.empty([cut.room for cut in cuts], dtype=dtype, device=device)
        if any(cut.room > cut.length for cut in cuts):
            data.zero_()
        weight = super().__new__(cls, data, requires_grad=False)
        weight.parts = parts or {}
        weight.cuts = cuts
        weight.one_tensor = one_tensor
        weight.changes = changes
        weight.packed = False
        weight.row_scale = None
        return weight

    def targets(self, name: str) -> Iterator[tuple[str, Piece]]:
        """Yield (checkpoint tensor name, piece of that tensor and of this weight). name: the parameter's own.
        For `a.qkv_proj.weight` with parts q_proj and k_proj, the checkpoint has `a.q_proj.weight` and
        `a.k_proj.weight`. A name may be repeated.
        """
        assert not self.packed, f"{name} is packed: it can no longer be loaded"
        if not self.parts:
            yield name, _piece(self.data, self.cuts)
            return
        module, _, kind = name.rpartition(".")
        parent = module.rpartition(".")[0]
        total = sum(cut.total for cut in self.parts.values())
        before = 0
        for part, rows, memory in self._stacked(self.data):
            if self.one_tensor:
                shifted = rows._replace(total=total, start=before + rows.start)
                yield name, _piece(memory, (shifted, *self.cuts[1:]))
            else:
                yield f"{parent}.{part}.{kind}", _piece(memory, (rows, *self.cuts[1:]))
            before += rows.total

    def finish(self) -> None:
        """Turn the checkpoint's values into those that the layer uses, by `changes`. Call it once, after the
        last tensor.
        """
        for change in self.changes:
            self.data.copy_(change(self.data))

    def _stacked(self, data: Tensor) -> Iterator[tuple[str, Cut, Tensor]]:
        """Yield (name, cut, rows of data) of each part."""
        start = 0
        for part, cut in self.parts.items():
            yield part, cut, data.narrow(0, start, cut.room)
            start += cut.room


class ExpertWeight(Weight):
    """Weight [num_experts, rows, columns]. The checkpoint has each expert's part as a separate matrix."""

    def targets(self, name: str) -> Iterator[tuple[str, Piece]]:
        """Yield checkpoint names and pieces. For `a.experts.gate_up_proj.weight` with parts gate_proj and
        up_proj, the checkpoint has `a.experts.0.gate_proj.weight` and so on.
        """
        module, _, kind = name.rpartition(".")
        parent = module.rpartition(".")[0]
        for expert, data in enumerate(self.data):
            for part, rows, memory in self._stacked(data):
                yield f"{parent}.{expert}.{part}.{kind}", _piece(memory, (rows, self.cuts[2]))


def _piece(memory: Tensor, cuts: Sequence[Cut]) -> Piece:
    for dimension, cut in enumerate(cuts):
        memory = memory.narrow(dimension, 0, cut.length)
    return Piece(tuple(cut.total for cut in cuts), tuple(cut.where for cut in cuts), memory)


def stacked_size(parts: Mapping[str, Cut]) -> Cut:
    """Return the dimension of a packed weight along which its parts are stacked."""
    return whole(sum(cut.room for cut in parts.values()))
