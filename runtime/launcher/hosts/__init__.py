"""Hosts of a launch's processes: this machine, and others that have joined it."""
