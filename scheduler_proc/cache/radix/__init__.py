"""The radix tree of prefixes, and what of it is evicted first."""
