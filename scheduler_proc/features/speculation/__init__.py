"""Speculative decoding: guesses at a request's next tokens, which the worker verifies."""
