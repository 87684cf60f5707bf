"""The real scheduler under random traffic, with planted mistakes. A new mistake is a row of
tests/harness/mutants.
"""
