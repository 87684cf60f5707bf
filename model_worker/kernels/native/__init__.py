"""Kernels in C++ for the CPU: sources, build and binding. The torch versions define the results."""
