"""Adapters of a model: read from their files beside the forward, and put where it computes with them."""
