"""Pages of the KV cache: which are free, and which a row has."""
