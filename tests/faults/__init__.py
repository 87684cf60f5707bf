"""Faults that a launch survives: its processes are killed and stopped, its callers are watched."""
