"""Beam search: which hypotheses of one request go on, and which have ended."""
