"""Logits processors of the launch: their calls, and their place in a step."""
