"""Decoders of the transformers library that have no spec here: its modules, with our attention and KV cache.

load.load_model ─► config.check ─► from_pretrained ─► probe.find_layers ─► model.TransformersModel
                                       └► reference logits ──────────────► verify.verify, with a backend
"""
