"""Phi-3, Phi-3.5 and Phi-4: packed projections in the checkpoint; some rotate only a part of each head."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec(packed_in_checkpoint=True)
