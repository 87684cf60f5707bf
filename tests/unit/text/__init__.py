"""Incremental decoding, lengths of tokens, rings without a tokenizer. Chat templates: tests/cpu/tokenizer."""
