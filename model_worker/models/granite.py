"""Granite 3.x (dense): multipliers on embeddings, updates, scores and logits."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(qkv_bias="config", o_bias="config", mlp_bias="config")
