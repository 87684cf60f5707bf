"""Pages of KV and who owns them: free list, prefix cache,
rows. `CACHES` names what may stand in for the prefix cache.
"""

CACHES = {
    "radix": "scheduler_proc.cache.radix_cache:RadixCache",
    "none": "scheduler_proc.cache.no_cache:NoCache",
}
