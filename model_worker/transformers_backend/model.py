"""TransformersModel: a decoder of the transformers library with the interface of our own models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from model_worker.attention.base import AttentionBackend
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.memory.kv_pool import KVLayout, MHATokenToKVPool
from model_worker.ops.base import Ops
from model_worker.transformers_backend.attention import PagedAttention, answering
from model_worker.transformers_backend.bind import bind
from model_worker.transformers_backend.probe import Found


@dataclass
class _Output(ModelOutput):  # type: ignore[misc]
    """Fields that a causal model may read from its decoder's output."""

    last_hidden_state: Tensor | None = None
    past_key_values: Any = None
    cache: Any = None  # its name from transformers 5.24 on
    hidden_states: Any = None
    attentions: Any = None
    cross_attentions: Any = None
    router_logits: Any = None


class _Computed(nn.Module):
    """Replaces a causal model's decoder when the hidden states are given and only the head is computed."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class TransformersModel:
    """Modules of one causal model, split at the head. The causal model's own forward makes the logits, so
    that everything it does to them (scales, soft-caps) is done; its decoder is replaced by one that returns
    given hidden states.
    """

    def __init__(self, hf: PreTrainedModel, found: Found) -> None:
        self._found = found
        self._decoder = hf.get_decoder()
        (name,) = [name for name, module in hf.named_modules() if module is self._decoder]
        hf.set_submodule(name, _Computed())
        self._head = hf

    @property
    def kv_layout(self) -> KVLayout:
        return self._found.layout

    def limit_attention(self, window: int) -> None:
        """Let no layer see more than the last `window` tokens from now on."""
        self._found = self._found.limited(window)

    def bind(self, ops: Ops) -> None:
        """Compute the linear layers whose weights `ops` packs through `ops` from now on."""
        bind(self._decoder, self._head, ops)

    def __call__(self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend) -> Tensor:
        """Compute the batch as CausalLM.forward does."""
        with answering(PagedAttention(self._found.layers, batch, kv_pool, backend)):
            output = self._decoder(
                input_ids=batch.input_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state[0]
        wanted = batch.output_indices
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Apply the head: return logits [n, vocab_size] float32 for hidden [n, hidden_size]; on ranks other
        than 0 without rows.
        """
        logits: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0].to(torch.float32)
