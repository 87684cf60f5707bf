"""Traces over HTTP, taken by a collector of the tests."""
