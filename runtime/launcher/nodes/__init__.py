"""Launches over several machines. Node 0 has the ring; each other node has an agent that runs ranks only."""
