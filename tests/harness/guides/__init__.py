"""Guides that tests draw at random, and guides that are meant to cost too much."""
