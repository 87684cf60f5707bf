"""Memory of the KV cache, and tables by row."""
