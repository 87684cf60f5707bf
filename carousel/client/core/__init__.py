"""The session of a client: its requests, what has come of each, and what makes one again after a restart."""
