"""Rows of a step, in a scheduler that runs: policies, batching types, adapters, a user's own schedulers."""
