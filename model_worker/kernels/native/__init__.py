"""Kernels in C++ for the CPU: sources, build, binding. The torch versions define the results."""
