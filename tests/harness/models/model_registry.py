"""All architectures that are served, with the tiny checkpoints with which each is compared with the
reference.

A case is a config of the reference's own class. Importing this module needs transformers, but no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

VOCAB_SIZE = 97
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large, so that attention decides the logits
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Into how many ranks tests/cpu/parallel/test_tensor_parallel.py cuts each case; with four, KV heads are
# shared.
RANK_COUNTS = (2, 4)
_EXPERTS: dict[str, Any] = TINY | {"num_experts_per_tok": 2, "head_dim": 16}
_GEMMA: dict[str, Any] = TINY | {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One tiny checkpoint. by_token: the reference reads what follows the prompt token by token, as it does
    when it generates, because its rotary embedding depends on the length of what it is given.
    """

    config: PreTrainedConfig
    by_token: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture, for the documentation and the tests."""

    models: str
    cases: dict[str, Case]


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 5000.0, **parameters}}


def _llama(**changes: Any) -> Case:
    return Case(LlamaConfig(**(TINY | changes)))


_LONG = [1.0, 1.5, 2.0, 3.0, 5.0, 9.0, 14.0, 20.0]
_SHORT = [1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "Llama 1, 2, 3, 3.1, 3.2 (text), 3.3 and what shares their architecture",
        {
            "llama": _llama(),
            "llama_tied_biased": _llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
            "llama_wide_heads": _llama(head_dim=32),
            "llama_linear": _llama(**_rope(rope_type="linear", factor=4.0)),
            "llama_dynamic": Case(
                LlamaConfig(
                    **(TINY | {"max_position_embeddings": 60} | _rope(rope_type="dynamic", factor=4.0))
                ),
                by_token=True,
            ),
            "llama_yarn": _llama(**_rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=32)),
            "llama_yarn_tuned": _llama(
                **_rope(
                    rope_type="yarn",
                    factor=4.0,
                    original_max_position_embeddings=64,
                    beta_fast=16.0,
                    beta_slow=2.0,
                    mscale=0.7,
                    mscale_all_dim=1.2,
                    truncate=False,
                )
            ),
            "llama_llama3": _llama(
                **_rope(
                    rope_type="llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=64,
                )
            ),
            "llama_longrope": _llama(
                **_rope(
                    rope_type="longrope",
                    long_factor=_LONG,
                    short_factor=_SHORT,
                    original_max_position_embeddings=5,
                )
            ),
        },
    ),
    "MistralForCausalLM": Family(
        "Mistral 7B, Nemo, Small (text)",
        {
            "mistral": Case(MistralConfig(**TINY, sliding_window=None)),
            "mistral_window": Case(MistralConfig(**TINY, sliding_window=11)),
        },
    ),
    "Qwen2ForCausalLM": Family(
        "Qwen2, Qwen2.5",
        {
            "qwen2": Case(Qwen2Config(**TINY)),
            "qwen2_window": Case(
                Qwen2Config(**TINY, use_sliding_window=True, sliding_window=7, max_window_layers=1)
            ),
        },
    ),
    "Qwen3ForCausalLM": Family(
        "Qwen3", {"qwen3": Case(Qwen3Config(**TINY, head_dim=16, attention_bias=True))}
    ),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3-MoE (30B-A3B, 235B-A22B, Coder)",
        {
            "qwen3_moe": Case(
                Qwen3MoeConfig(**_EXPERTS, num_experts=6, moe_intermediate_size=48, norm_topk_prob=True)
            ),
            "qwen3_moe_some_dense": Case(
                Qwen3MoeConfig(
                    **(_EXPERTS | {"num_hidden_layers": 4}),
                    num_experts=5,
                    moe_intermediate_size=32,
                    decoder_sparse_step=2,
                    mlp_only_layers=[3],
                )
            ),
        },
    ),
    "MixtralForCausalLM": Family(
        "Mixtral 8x7B, 8x22B",
        {
            "mixtral": Case(MixtralConfig(**_EXPERTS, num_local_experts=5)),
            "mixtral_window": Case(MixtralConfig(**_EXPERTS, num_local_experts=4, sliding_window=10)),
        },
    ),
    "Gemma2ForCausalLM": Family(
        "Gemma 2",
        {
            "gemma2": Case(Gemma2Config(**_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=12.0)),
        },
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma 3 (text: 270M, 1B)",
        {
            "gemma3": Case(
                Gemma3TextConfig(
                    **_GEMMA,
                    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                    rope_parameters={
                        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    },
                )
            ),
        },
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        {
            "phi3": Case(Phi3Config(**TINY, sliding_window=13)),
            "phi3_partial_longrope": Case(
                Phi3Config(
                    **TINY,
                    original_max_position_embeddings=5,
                    **_rope(
                        rope_type="longrope",
                        partial_rotary_factor=0.75,
                        long_factor=_LONG[:6],
                        short_factor=_SHORT[:6],
                    ),
                )
            ),
            "phi3_partial_short": Case(
                Phi3Config(
                    **TINY,
                    original_max_position_embeddings=256,
                    **_rope(
                        rope_type="longrope",
                        partial_rotary_factor=0.5,
                        long_factor=_LONG[:4],
                        short_factor=_SHORT[:4],
                    ),
                )
            ),
        },
    ),
    "Olmo2ForCausalLM": Family("OLMo 2", {"olmo2": Case(Olmo2Config(**TINY))}),
    "GraniteForCausalLM": Family(
        "Granite 3.x (dense)",
        {
            "granite": Case(
                GraniteConfig(
                    **TINY,
                    embedding_multiplier=6.0,
                    residual_multiplier=0.4,
                    attention_multiplier=0.2,
                    logits_scaling=2.0,
                )
            ),
        },
    ),
    "Starcoder2ForCausalLM": Family(
        "StarCoder2", {"starcoder2": Case(Starcoder2Config(**TINY, sliding_window=12))}
    ),
    "CohereForCausalLM": Family(
        "Command R, Command R+",
        {
            "cohere": Case(CohereConfig(**TINY, logit_scale=0.4, attention_bias=True)),
            "cohere_qk_norm": Case(CohereConfig(**TINY, logit_scale=0.4, use_qk_norm=True)),
        },
    ),
}

MULTIMODAL: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma 3 (4B, 12B, 27B)",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1, 3.2",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
}
"""Models of which the text part is served; their cases are in tests/cpu/models/test_text_parts.py."""

QUANTIZED = ("int8",)
"""Methods of quantisation that the first case of every family is run with (test_int8_models.py)."""

CASES: dict[str, Case] = {name: case for family in FAMILIES.values() for name, case in family.cases.items()}
