"""Measurements of guides whose masks are slow."""
