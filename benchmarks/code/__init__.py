"""Measurements of the source itself."""
