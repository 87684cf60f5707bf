"""Beam search against transformers, and with groups of rows in the simulation."""
