"""Gemma 3 (text): windows with a rotary base of their own, norms of queries and keys."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(
    qkv_bias="config",
    o_bias="config",
    layout="sandwich",
    norm="rms_offset",
    qk_norm="head",
    scaled_embedding=True,
)
