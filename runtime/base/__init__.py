"""Lowest layer of the project: errors, lookup of implementations by name, logging, environment variables."""
