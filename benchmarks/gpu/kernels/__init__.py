"""Kernels one by one: how fast they are, how they are compiled and launched."""
