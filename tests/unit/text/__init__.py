"""Tokenizers, templates, incremental decoding."""
