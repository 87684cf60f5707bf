"""Architectures that the transformers backend serves, and those that it refuses, as confirmed by tests.

Other decoders of that library are checked at load. Importing this module needs transformers, but no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from tests.harness.models.model_registry import TINY, VOCAB_SIZE, Case

_BASE: dict[str, Any] = TINY | {"num_hidden_layers": 3}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
_ROUTED: dict[str, Any] = _EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = _ROUTED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
_WINDOW = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tiny config of the reference's own class, made when it is needed: there are many classes."""

    model_type: str
    changes: dict[str, Any]

    def case(self) -> Case:
        return Case(CONFIG_MAPPING[self.model_type](**(_BASE | self.changes)))


class Served(NamedTuple):
    models: str
    recipe: Recipe


def _tiny(model_type: str, **changes: Any) -> Recipe:
    return Recipe(model_type, changes)


def _served(models: str, model_type: str, **changes: Any) -> Served:
    return Served(models, Recipe(model_type, changes))


SERVED: dict[str, Served] = {
    "ApertusForCausalLM": _served("Apertus", "apertus"),
    "ArceeForCausalLM": _served("AFM-4.5B", "arcee"),
    "BioGptForCausalLM": _served("BioGPT", "biogpt"),
    "Cohere2ForCausalLM": _served("Command R7B, A", "cohere2", sliding_window=9, layer_types=_WINDOW),
    "CwmForCausalLM": _served("Code World Model", "cwm", sliding_window=9, head_dim=16, layer_types=_WINDOW),
    "DeepseekV2ForCausalLM": _served("DeepSeek-V2", "deepseek_v2", **_LATENT),
    "DeepseekV3ForCausalLM": _served("DeepSeek-V3, R1", "deepseek_v3", **_LATENT),
    "Dots1ForCausalLM": _served("dots.llm1", "dots1", **_ROUTED, head_dim=16),
    "Ernie4_5ForCausalLM": _served("ERNIE 4.5 (dense)", "ernie4_5", head_dim=16),
    "Ernie4_5_MoeForCausalLM": _served(
        "ERNIE 4.5 (experts)", "ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=48
    ),
    "Exaone4ForCausalLM": _served("EXAONE 4", "exaone4", sliding_window=9, layer_types=_WINDOW),
    "FlexOlmoForCausalLM": _served("FlexOlmo", "flex_olmo", **_EXPERTS),
    "GemmaForCausalLM": _served("Gemma 1", "gemma", head_dim=16),
    "GlmForCausalLM": _served("GLM-4 9B (in transformers' format)", "glm", head_dim=16),
    "Glm4ForCausalLM": _served("GLM-4-0414", "glm4", head_dim=16),
    "Glm4MoeForCausalLM": _served("GLM-4.5, 4.6", "glm4_moe", **_ROUTED, head_dim=16),
    "GPT2LMHeadModel": _served("GPT-2, DistilGPT-2", "gpt2", **_GPT2),
    "GPTBigCodeForCausalLM": _served("StarCoder, SantaCoder", "gpt_bigcode", **_GPT2),
    "GPTNeoXForCausalLM": _served("GPT-NeoX, Pythia", "gpt_neox"),
    "GraniteMoeForCausalLM": _served(
        "Granite 3.x (experts)", "granitemoe", **_EXPERTS, attention_multiplier=0.2, logits_scaling=2.0
    ),
    "GraniteMoeSharedForCausalLM": _served(
        "Granite (shared experts)", "granitemoeshared", **_EXPERTS, shared_intermediate_size=48
    ),
    "HeliumForCausalLM": _served("Helium", "helium", head_dim=16),
    "HunYuanDenseV1ForCausalLM": _served("Hunyuan (dense)", "hunyuan_v1_dense", head_dim=16),
    "JetMoeForCausalLM": _served("JetMoE", "jetmoe", **_EXPERTS, kv_channels=16),
    "MinistralForCausalLM": _served("Ministral", "ministral", sliding_window=9, head_dim=16),
    "NemotronForCausalLM": _served("Nemotron 4, Minitron", "nemotron"),
    "OlmoForCausalLM": _served("OLMo 1", "olmo"),
    "Olmo3ForCausalLM": _served("OLMo 3", "olmo3", sliding_window=9, layer_types=_WINDOW),
    "OlmoeForCausalLM": _served("OLMoE", "olmoe", **_EXPERTS),
    "OPTForCausalLM": _served("OPT", "opt", ffn_dim=80, word_embed_proj_dim=64),
    "PersimmonForCausalLM": _served("Persimmon", "persimmon"),
    "PhiForCausalLM": _served("Phi-1, 1.5, 2", "phi"),
    "Qwen2MoeForCausalLM": _served(
        "Qwen1.5-MoE, Qwen2-MoE", "qwen2_moe", **_EXPERTS, shared_expert_intermediate_size=48
    ),
    "SeedOssForCausalLM": _served("Seed-OSS", "seed_oss", head_dim=16),
    "SmolLM3ForCausalLM": _served("SmolLM3", "smollm3"),
    "StableLmForCausalLM": _served("StableLM", "stablelm"),
    "VaultGemmaForCausalLM": _served(
        "VaultGemma", "vaultgemma", head_dim=16, sliding_window=9, query_pre_attn_scalar=24
    ),
}


# A config, and words of the reason.
REFUSED: dict[str, tuple[Recipe, str]] = {
    "bert": (_tiny("bert"), "not causal"),
    "bloom": (_tiny("bloom"), "its attention is its own"),
    "codegen": (_tiny("codegen", **_GPT2, rotary_dim=8), "its attention is its own"),
    "diffllama": (_tiny("diffllama"), "called twice"),
    "doge": (_tiny("doge"), "an attention mask of its own"),
    "falcon": (_tiny("falcon"), "its attention is its own"),
    "falcon_alibi": (_tiny("falcon", alibi=True), "its attention is its own"),
    "gemma4_text": (
        _tiny("gemma4_text", head_dim=16, sliding_window=9, vocab_size_per_layer_input=VOCAB_SIZE),
        "differ in the number or width of KV heads",
    ),
    "gpt_neo": (
        _tiny("gpt_neo", num_layers=2, num_hidden_layers=2, attention_types=[[["global", "local"], 1]]),
        "its attention is its own",
    ),
    "gpt_oss": (_tiny("gpt_oss", **_EXPERTS, head_dim=16, sliding_window=9), "attention sinks"),
    "gptj": (_tiny("gptj", **_GPT2, rotary_dim=8), "its attention is its own"),
    "jamba": (_tiny("jamba", num_hidden_layers=8, attn_layer_offset=1), "layers of kind"),
    "lfm2": (_tiny("lfm2", layer_types=["conv", "full_attention", "conv"]), "layers of kind conv"),
    "llama4_text": (
        _tiny("llama4_text", **_EXPERTS, head_dim=16, intermediate_size_mlp=80, attention_chunk_size=8),
        "layers of kind chunked_attention",
    ),
    "llama_dynamic": (
        _tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "rope_type dynamic",
    ),
    "llama_window": (_tiny("llama", sliding_window=9), "do not pass it to attention"),
    "mpt": (_tiny("mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=128), "its attention is its own"),
    "qwen3_next": (_tiny("qwen3_next", **_EXPERTS, head_dim=16), "layers of kind linear_attention"),
}
SERVED_FROM = {"codegen": "5.24", "gptj": "5.24"}
"""First version of transformers, by name, in which a model computes attention as others do and is served."""


def is_served_by_now(name: str) -> bool:
    """Return True if the installed transformers library serves what earlier versions of it do not."""
    return name in SERVED_FROM and Version(transformers.__version__) >= Version(SERVED_FROM[name])
