"""Sampling parameters, each said once: `table.py` has a row for each, and all else is made of the rows."""
