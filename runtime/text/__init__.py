"""Tokenizers and chat templates, shared by the tokenizer and the detokenizer. Imports no torch."""
