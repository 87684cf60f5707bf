"""Tables of architectures: the spec that serves each, and how its config.json differs from the usual one.
Knows spellings and defaults of config.json; knows no layer and opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Windowed = Literal["none", "all", "opted_in", "upper", "interleaved"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Architecture(NamedTuple):
    """One row of the table. Everything but the spec says how to read the architecture's config.json.

    windowed: which layers a configured sliding window holds for, when no layer_types list says it. "opted_in"
    is all of them, but only when use_sliding_window is set; "upper" those from max_window_layers on, on the
    same condition; "interleaved" all but each sliding_window_pattern-th. keys: a field of
    runtime.checkpoint.config_file -> its key here, or several keys, the first of which that is present
    counts. A field of OptionalKeys is read only when it is named here: other architectures would ignore the
    key, and so do we. defaults: value of an absent key, if it differs from that of
    runtime.checkpoint.config_file. ships_code: published checkpoints name code of their own (auto_map), and
    it computes what the spec says. It is not run; where this is not set, such a checkpoint is refused.
    """

    spec: str  # import string of its ModelSpec
    windowed: Windowed = "none"
    keys: Mapping[str, str | tuple[str, ...]] = _NOTHING
    defaults: Mapping[str, Any] = _NOTHING
    ships_code: bool = False


class MultimodalArchitecture(NamedTuple):
    """One multimodal architecture, whose text decoder is served.

    decoder: the row of ARCHITECTURES that computes it. model_types: those that text_config may name; another
    is another decoder. towers: modules that read images, sound or video; their tensors are not loaded.
    defaults: as in Architecture, of text_config and of tie_word_embeddings beside it; its values win over the
    decoder's. rotates_axes: rotary parameters give parts of a head to the axes of an image (mrope_section). A
    token of text has the same position on each, which is the ordinary rotation.
    """

    decoder: str
    model_types: tuple[str, ...]
    towers: tuple[str, ...]
    defaults: Mapping[str, Any] = _NOTHING
    rotates_axes: bool = False

    def decoder_name(self, name: str) -> str | None:
        """Return the name that a tensor of the files has in the decoder alone; None if it belongs to a tower.
        Files use `language_model.model.` and `language_model.lm_head.` as most are published,
        `model.language_model.` and `lm_head.` as transformers 5 has them in memory, or the decoder's own
        names.
        """
        if name.removeprefix("model.").startswith(self.towers):
            return None
        if name.startswith("model.language_model."):
            return "model." + name.removeprefix("model.language_model.")
        return name.removeprefix("language_model.")


_EXPERT_KEYS = {
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
    "expert_layer_step": "decoder_sparse_step",
    "dense_layers": "mlp_only_layers",
}
_GEMMA_KEYS = {
    "hidden_act": "hidden_activation",
    "attention_scale_dim": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "logits_softcap": "final_logit_softcapping",
    "use_bidirectional_attention": "use_bidirectional_attention",
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("model_worker.models.llama:SPEC"),
    "MistralForCausalLM": Architecture(
        "model_worker.models.mistral:SPEC", windowed="all", defaults={"sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Architecture(
        "model_worker.models.qwen2:SPEC", windowed="upper", defaults={"sliding_window": 4096}
    ),
    "Qwen3ForCausalLM": Architecture(
        "model_worker.models.qwen3:SPEC",
        windowed="upper",
        defaults={"sliding_window": 4096, "head_dim": 128},
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "model_worker.models.qwen3_moe:SPEC",
        windowed="opted_in",
        keys=_EXPERT_KEYS | {"num_experts": ("num_experts", "num_local_experts")},
        defaults={
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
    ),
    "MixtralForCausalLM": Architecture(
        "model_worker.models.mixtral:SPEC",
        windowed="all",
        keys={"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"},
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
        },
    ),
    "Gemma2ForCausalLM": Architecture(
        "model_worker.models.gemma2:SPEC",
        windowed="interleaved",
        keys=_GEMMA_KEYS,
        defaults=_GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": Architecture(
        "model_worker.models.gemma3:SPEC",
        windowed="interleaved",
        keys=_GEMMA_KEYS
        | {"sliding_window_pattern": "sliding_window_pattern", "window_rope_theta": "rope_local_base_freq"},
        defaults=_GEMMA_DEFAULTS
        | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 10000.0},
    ),
    "Phi3ForCausalLM": Architecture(
        "model_worker.models.phi3:SPEC",
        windowed="all",
        keys={"rotary_fraction": "partial_rotary_factor"},
        defaults={"rms_norm_eps": 1e-5},
        ships_code=True,
    ),
    "Olmo2ForCausalLM": Architecture("model_worker.models.olmo2:SPEC", defaults={"rms_norm_eps": 1e-5}),
    "GraniteForCausalLM": Architecture(
        "model_worker.models.granite:SPEC",
        keys={
            "attention_scale": "attention_multiplier",
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "logits_divisor": "logits_scaling",
        },
        defaults={"attention_multiplier": 1.0},
    ),
    "Starcoder2ForCausalLM": Architecture(
        "model_worker.models.starcoder2:SPEC",
        windowed="all",
        keys={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias", "mlp_bias": "use_bias"},
        defaults={
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
        },
    ),
    "CohereForCausalLM": Architecture(
        "model_worker.models.cohere:SPEC",
        keys={
            "rms_norm_eps": "layer_norm_eps",
            "qk_norm": "use_qk_norm",
            "logits_multiplier": "logit_scale",
        },
        defaults={
            "layer_norm_eps": 1e-5,
            "use_qk_norm": False,
            "logit_scale": 0.0625,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
}

_LLAVA_TOWERS = ("vision_tower.", "multi_modal_projector.")

TEXT_PARTS: dict[str, MultimodalArchitecture] = {
    "Gemma3ForConditionalGeneration": MultimodalArchitecture(
        "Gemma3ForCausalLM",
        model_types=("gemma3_text",),
        towers=_LLAVA_TOWERS,
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
    "Mistral3ForConditionalGeneration": MultimodalArchitecture(
        "MistralForCausalLM",
        model_types=("mistral",),
        towers=_LLAVA_TOWERS,
        defaults={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": MultimodalArchitecture(
        "Qwen2ForCausalLM",
        model_types=("qwen2_5_vl_text", "qwen2_5_vl"),
        towers=("visual.",),
        defaults={
            "vocab_size": 152064,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "max_window_layers": 80,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        rotates_axes=True,
    ),
}


def row_of(name: str) -> Architecture | None:
    """Return the row of an architecture; for a multimodal one, the row of its decoder."""
    part = TEXT_PARTS.get(name)
    if part is None:
        return ARCHITECTURES.get(name)
    decoder = ARCHITECTURES[part.decoder]
    return decoder._replace(defaults={**decoder.defaults, **part.defaults}, ships_code=False)
