"""Layers of the transformer: weights and the kernels that use them. Know no model family and no file."""
