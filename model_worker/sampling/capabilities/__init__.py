"""Sampling features beyond a plain draw, one class each, in the order of docs/sampling.md."""
