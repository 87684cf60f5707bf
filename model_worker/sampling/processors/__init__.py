"""Logits processors of the launch's own: what calls them, and where in a step."""
