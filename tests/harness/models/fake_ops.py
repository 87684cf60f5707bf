"""FakeOps: an Ops without kernels, for any model. The next token is the last one's successor.

Weights become NaN when they are bound, so code that computes with them outside the Ops is detected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.combine import combine
from model_worker.kernels.decode_inputs import lay_out_decodes
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.ops.adapters import RowAdapters, TorchAdapters, TorchRows
from model_worker.ops.base import ExpertWeights, Frequencies, KernelTable, LinearWeight, Ops
from runtime.checkpoint.model_config import Activation


class FakeAttention:
    """Looks at nothing. slots: where each layer was to store a token."""

    norms_heads = True

    def __init__(self) -> None:
        self.slots: list[list[int]] = []
        self._prepared: ForwardBatch | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        self._prepared = batch

    def forward(
        self,
        layer: AttentionLayer,
        inputs: AttentionInputs,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
    ) -> Tensor:
        assert batch is self._prepared, "prepare(batch) runs before the forward"
        assert inputs.q.shape == (len(batch.input_ids), layer.num_heads, layer.head_dim)
        self.slots.append(batch.out_slots.tolist())
        return torch.zeros(inputs.q.shape)


class _Fake:
    """A product, or experts."""

    batch_invariant = False
    packs_weight = False

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self._compute = compute

    def __call__(self, *args: Tensor, **options: Any) -> Tensor:
        return self._compute(*args, **options)


class _Unchanged:
    """A norm that norms nothing."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.clone()

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: Any = None) -> Tensor:
        return residual.add_(update).clone()


class _Successors:
    """A head whose largest logit is that of the id after the last one."""

    batch_invariant = False
    packs_weight = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        successors = (hidden[:, 0].long() + 1) % self._vocab_size
        return torch.nn.functional.one_hot(successors, self._vocab_size).float()


class FakeOps(Ops):
    """The first column of hidden states is the token's id, in every layer; all else is zero."""

    name = "fake"
    sampling_kernels = None

    def __init__(self) -> None:
        self.attention: FakeAttention = FakeAttention()
        self.combine = combine
        self.lay_out_decodes = lay_out_decodes
        self.table = KernelTable()

    def embedding(
        self, weight: LinearWeight, *, first: int | None = None, multiplier: float = 1.0
    ) -> Callable[[Tensor], Tensor]:
        self._take("embedding", weight.rows)
        size = weight.rows.shape[1]
        return lambda ids: torch.nn.functional.pad(ids.float().unsqueeze(1), (0, size - 1))

    def take_rows(self, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        self._take("take_rows")
        return lambda table, index: table[index]

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> _Unchanged:
        self._take("rms_norm", weight)
        return _Unchanged()

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> _Unchanged:
        self._take("layer_norm", weight, bias)
        return _Unchanged()

    def rotary_angles(
        self, frequencies: Tensor | Frequencies, amplitude: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        self._take("rotary_angles")
        return lambda positions: torch.zeros(len(positions), 1)

    def packs(self, weight: Tensor) -> bool:
        return False

    def linear(self, weight: LinearWeight, bias: Tensor | None = None) -> _Fake:
        self._take("linear", weight.rows, weight.scale, bias)
        return _Fake(lambda x: torch.zeros(len(x), len(weight.rows)))

    def head(self, weight: LinearWeight) -> _Successors:
        self._take("head", weight.rows)
        return _Successors(len(weight.rows))

    def activation(self, name: Activation, width: int) -> Callable[[Tensor], Tensor]:
        self._take("activation")
        return lambda x: x

    def gated(self, product: Any, name: Activation, width: int) -> Callable[[Tensor], Tensor]:
        self._take("gated")
        return lambda x: torch.zeros(len(x), width)

    def experts(self, weights: ExpertWeights) -> _Fake:
        self._take("experts", weights.gate_up, weights.down)
        return _Fake(lambda hidden, scores: torch.zeros(hidden.shape))

    def row_adapters(self, max_rows: int, num_slots: int, device: torch.device | str = "cpu") -> TorchRows:
        return TorchRows(max_rows, num_slots)

    def adapters(
        self,
        rows: RowAdapters,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        max_rank: int,
        max_parts: int,
    ) -> TorchAdapters:
        assert isinstance(rows, TorchRows)
        return TorchAdapters(rows)

    def _take(self, operation: str, *weights: Tensor | None) -> None:
        self.table.note(operation, self.name)
        for weight in weights:
            if weight is not None:
                weight.data.fill_(torch.nan)
