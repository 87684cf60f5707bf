"""Shapes of the measured models. Their weights are random, which takes the same time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 16384,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GEMMA: dict[str, Any] = {
    **_LLAMA,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "num_hidden_layers": 26,
    "tie_word_embeddings": True,
}
_QWEN3: dict[str, Any] = {**_LLAMA, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "head_dim": 128}
_LLAMA_8B: dict[str, Any] = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-8b-fp8": {**_LLAMA_8B, "quantization_config": {"quant_method": "fp8"}},
    "qwen3-0.6b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "gemma-2-2b": {
        **_GEMMA,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "rope_theta": 10000.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 256000,
    },
    "gemma-3-1b": {
        **_GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 262144,
    },
    # All features of the other shapes, small enough for an interpreter.
    "tiny": {
        **_LLAMA,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "vocab_size": 97,
    },
}


def linear_shapes(name: str) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the fused linear layers of a shape with gated feed-forward layers."""
    shape = SHAPES[name]
    hidden, heads, width = shape["hidden_size"], shape["num_attention_heads"], shape["intermediate_size"]
    head_dim = shape.get("head_dim", hidden // heads)
    return {
        "q, k and v": ((heads + 2 * shape["num_key_value_heads"]) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "gate and up": (2 * width, hidden),
        "down": (hidden, width),
        "head": (shape["vocab_size"], hidden),
    }


def write_config(name: str, folder: Path) -> None:
    """Write the shape's config.json into the folder."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
