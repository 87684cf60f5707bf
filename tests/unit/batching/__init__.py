"""Rows of a step, each part alone: admission, chunks, slots. In a scheduler that runs: tests/simulation."""
