"""Beam search: chooses which hypotheses of a request continue and which have ended."""
