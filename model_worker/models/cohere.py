"""Cohere Command R and R+: attention and feed-forward side by side, layer norms, rotation of neighbours."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(
    qkv_bias="config",
    o_bias="config",
    layout="parallel",
    norm="layer",
    qk_norm="each_head",
    rotary_pairs="adjacent",
)
