"""Guides of structured output: their kinds, and the check of JSON schemas."""
