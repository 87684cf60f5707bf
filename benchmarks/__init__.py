"""Benchmarks, each run with python -m. With CAROUSEL_CPU_ISA they measure a CPU with fewer
instruction sets.
"""

from runtime.base.cpu_isa import hold_back_libraries

hold_back_libraries()
