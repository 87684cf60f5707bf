"""Model families: one declarative spec each, for the transformer that they share.
runtime.checkpoint.architectures has the table of architectures and their specs.
"""
