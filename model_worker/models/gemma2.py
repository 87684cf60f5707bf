"""Gemma 2: soft-caps, windows in every other layer, norms on both sides of each half."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(
    qkv_bias="config", o_bias="config", layout="sandwich", norm="rms_offset", scaled_embedding=True
)
