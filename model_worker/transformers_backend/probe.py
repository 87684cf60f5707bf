"""Finds a model's attention layers by watching one forward, and refuses attention that no
backend computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from model_worker.attention.base import AttentionLayer, widest_window
from model_worker.memory.kv_pool import KVLayout
from model_worker.transformers_backend.attention import answering
from runtime.base.errors import ModelError

_NUM_TOKENS = 5

# Arguments of an attention call that can be ignored: positions are applied to query and key before the call,
# dropout is for training, and the rest asks for unused outputs.
_WITHOUT_EFFECT = {
    "dropout",
    "position_ids",
    "cache_position",
    "use_cache",
    "past_key_values",
    "cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "position_embeddings",
    "layer_idx",
}
_UNDERSTOOD = {"scaling", "sliding_window", "softcap", "is_causal"}
_REASONS = {
    "s_aux": "attention sinks",
    "attention_mask": "an attention mask of its own, as for ALiBi",
    "position_bias": "a bias by position",
    "alibi": "ALiBi",
}


@dataclass(frozen=True, slots=True)
class Found:
    """Attention layers of a model, in the order in which a forward calls them."""

    layers: Mapping[nn.Module, AttentionLayer]
    layout: KVLayout

    def limited(self, window: int) -> Found:
        """Return a copy in which no layer sees more than the last `window` tokens."""
        layers = {
            module: replace(layer, sliding_window=min(layer.sliding_window or window, window))
            for module, layer in self.layers.items()
        }
        widest = widest_window(layer.sliding_window for layer in layers.values())
        return Found(layers, replace(self.layout, attention_window=widest))


class _Watch:
    """Answers with plain causal attention, and records the calls."""

    def __init__(self) -> None:
        self.layers: dict[nn.Module, AttentionLayer] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
    ) -> Tensor:
        if module in self.layers:
            raise ModelError(f"{_REFUSED} a layer's attention is called twice in one forward.")
        _refuse_arguments(module, arguments)
        _refuse_shapes(query, key, value)
        head_dim = query.shape[-1]
        scale = arguments.get("scaling")
        self.layers[module] = AttentionLayer(
            layer_id=len(self.layers),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else float(scale),
            sliding_window=arguments.get("sliding_window"),
            softcap=arguments.get("softcap"),
        )
        attended = F.scaled_dot_product_attention(
            query.to(value.dtype), key.to(value.dtype), value, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended.transpose(1, 2).contiguous()


_REFUSED = "--model-impl transformers cannot serve this model:"


@torch.inference_mode()
def find_layers(hf: PreTrainedModel) -> Found:
    """Run a forward of a few tokens. Raises ModelError, which says what the model's attention needs and no
    backend has.
    """
    watch = _Watch()
    ids = torch.arange(_NUM_TOKENS, device=hf.device).unsqueeze(0)
    with answering(watch):
        hf(input_ids=ids, position_ids=ids, use_cache=False)
    layers = list(watch.layers.values())
    num_layers = hf.config.get_text_config().num_hidden_layers
    if len(layers) != num_layers:
        raise ModelError(
            f"{_REFUSED} {len(layers)} of its {num_layers} layers call the attention function. Layers with a "
            "state of another kind, and attention of their own, cannot be served."
        )
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) != 1:
        shown = ", ".join(f"{heads} of {width}" for heads, width in sorted(shapes))
        raise ModelError(f"{_REFUSED} its layers differ in the number or width of KV heads ({shown}).")
    _refuse_windows(hf.config.get_text_config(), layers)
    ((num_kv_heads, head_dim),) = shapes
    window = widest_window(layer.sliding_window for layer in layers)
    return Found(watch.layers, KVLayout(num_layers, num_kv_heads, head_dim, window))


def _refuse_arguments(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if value is None or name in _WITHOUT_EFFECT or name in _UNDERSTOOD:
            continue
        reason = _REASONS.get(name, f"an argument {name!r} that is not known")
        raise ModelError(f"{_REFUSED} its attention has {reason}.")
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{_REFUSED} its attention is not causal.")


def _refuse_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    tokens = {states.shape[2] for states in (query, key, value)}
    if tokens != {_NUM_TOKENS}:
        raise ModelError(f"{_REFUSED} its attention is not over the tokens themselves (cross attention).")
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise ModelError(f"{_REFUSED} its heads do not share keys and values in equal groups.")
    if query.shape[-1] != key.shape[-1] or value.shape[-1] > key.shape[-1]:
        raise ModelError(
            f"{_REFUSED} its heads are {query.shape[-1]} (query), {key.shape[-1]} (key) and "
            f"{value.shape[-1]} (value) wide."
        )


def _refuse_windows(config: PreTrainedConfig, layers: list[AttentionLayer]) -> None:
    """Raise ModelError for a window that the config has but the call does not, which would silently be wrong
    for every long prompt.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        expected: list[int | None] = [None] * len(layers)
    elif kinds is None:
        expected = [window] * len(layers)
    else:
        expected = [window if kind == "sliding_attention" else None for kind in kinds]
    if expected != [layer.sliding_window for layer in layers]:
        raise ModelError(
            f"{_REFUSED} config.json has sliding_window {window}, but its layers do not pass it to attention."
        )
