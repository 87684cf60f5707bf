"""Guides of structured output: which there are, and which JSON schemas can be kept."""
