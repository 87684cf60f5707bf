"""Simulation: random traffic through the real scheduler, with a hash instead of a model, and the judge of its
outputs.
"""
