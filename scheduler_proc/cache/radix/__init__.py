"""The radix tree of cached prefixes, and its eviction."""
