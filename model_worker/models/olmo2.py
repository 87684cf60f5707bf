"""OLMo 2: norms behind each half of a layer, and over all of a token's queries or keys together."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(
    qkv_bias="config", o_bias="config", layout="post_norm", norm="rms_wide", qk_norm="projection"
)
