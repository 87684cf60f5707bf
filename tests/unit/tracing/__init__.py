"""Stamps, timelines and trace contexts."""
