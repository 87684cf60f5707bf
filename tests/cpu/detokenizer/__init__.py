"""The detokenizer with a real tokenizer, and texts that cross. Parts without one are in
tests/unit/detokenizer.
"""
