"""Session of a client: its requests, their output so far, and how they are submitted again after
a restart.
"""
