"""Layers of the transformer: weights and the kernels that use them. They know no model family and no file."""
