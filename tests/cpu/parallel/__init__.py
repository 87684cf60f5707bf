"""Ranks, pipeline stages and nodes, as processes of this machine. Rank threads: tests/harness/models."""
