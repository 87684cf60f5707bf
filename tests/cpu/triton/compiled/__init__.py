"""What compiled kernels are like: first use, launches, what a step compiles. Needs Triton, no GPU."""
