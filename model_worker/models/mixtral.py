"""Mixtral: experts in every layer, under names of their own."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(
    names={
        "mlp": "block_sparse_moe",
        "router": "gate",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    }
)
