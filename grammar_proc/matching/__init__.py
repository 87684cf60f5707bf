"""Matchers: positions of guided outputs in their guides, the masks that follow, and whose turn it is."""
