"""Llama 2, 3, 3.1, 3.2 (text) and what shares their architecture."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(qkv_bias="config", o_bias="config", mlp_bias="config")
