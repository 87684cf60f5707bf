"""StarCoder2: layer norms with bias, a feed-forward layer without gate."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(
    qkv_bias="config",
    o_bias="config",
    mlp_bias="config",
    norm="layer_bias",
    gated_mlp=False,
    names={"up_proj": "c_fc", "down_proj": "c_proj"},
)
