"""Pages of the KV cache and their owners: the free list, the prefix cache, and rows."""
