"""Speculation: guesses at the next tokens of a request, which the worker verifies."""
