"""Tokenizers and chat templates as transformers reads them, and the tokenizer process with these. What needs
none: tests/unit/tokenizer and tests/unit/text.
"""
