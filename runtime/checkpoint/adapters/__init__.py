"""Adapters of a model: what stands in their directories."""
