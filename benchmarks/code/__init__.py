"""Measurements of the source code."""
