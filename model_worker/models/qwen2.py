"""Qwen2 and Qwen2.5 (dense)."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(qkv_bias="always")
