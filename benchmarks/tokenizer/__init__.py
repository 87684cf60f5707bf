"""Measurements of the tokenizer process."""
