"""The tokenizer process with real tokenizers. Parts without one are in tests/unit/tokenizer and
tests/unit/text.
"""
