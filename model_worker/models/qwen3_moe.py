"""Qwen3 with experts in most layers."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(qkv_bias="config", o_bias="config", qk_norm="head", names={"router": "gate"})
