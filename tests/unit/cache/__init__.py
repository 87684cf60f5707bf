"""Pages, the radix tree, and who gives them up. A policy gets its cases in tests/simulation/cache."""
