"""Pages, the radix tree, eviction, retention and shares. A policy gets its cases in test_eviction.py."""
