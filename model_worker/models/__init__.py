"""Model families: one declarative spec each, over the transformer they share.

Which architecture has which spec is a row of runtime.checkpoint.model_config.ARCHITECTURES.
"""
