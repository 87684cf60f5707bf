"""Compiled kernels: first use, launches, what a step compiles. Needs Triton, no GPU."""
