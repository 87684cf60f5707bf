"""Callers who mean it: each a program that measures what it costs others, run by a test beside it."""
