"""Guides of the grammar process: which are compiled, what they take, and which sequences follow them."""
