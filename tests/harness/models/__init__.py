"""Tiny models and checkpoints, plans, paged forwards, and the references that they are compared with."""
