"""Memory of the KV cache and of the tables of rows."""
