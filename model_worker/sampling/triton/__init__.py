"""Sampling's kernels for GPUs."""
