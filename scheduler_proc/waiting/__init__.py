"""Waiting requests and their order."""
