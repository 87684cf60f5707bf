"""Rings: launched as by a user (launched.py), in memory, with a worker that sleeps or follows a script."""
