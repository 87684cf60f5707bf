"""The worker: plans, memory, recorded steps, loading, C++ kernels. Plans: tests/harness/models/plans.py."""
