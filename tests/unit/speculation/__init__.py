"""Guesses and what they cost, without a worker."""
