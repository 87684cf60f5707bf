"""Measurements of single kernels: speed, compilation and launches."""
