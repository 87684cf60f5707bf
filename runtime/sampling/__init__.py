"""Sampling parameters. `table.py` has one row for each; checks, columns and documentation are derived from
the rows.
"""
