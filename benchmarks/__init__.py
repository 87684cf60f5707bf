"""Benchmarks, each run with python -m. With CAROUSEL_CPU_ISA they measure a CPU of fewer instructions."""

from runtime.base.cpu_isa import hold_back_libraries

hold_back_libraries()
