"""Executors: how a scheduler reaches the worker. Importing this package, or `process`, does not import torch.
Each module has `create(context, on_wait)`, which returns an executor once the worker is ready.
"""
