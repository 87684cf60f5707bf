"""Launches over several machines: node 0 has the ring, each other node an agent with ranks only."""
