"""Kernels: one operation for each file, on tensors only. The torch version defines the result."""
