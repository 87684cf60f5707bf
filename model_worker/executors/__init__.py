"""executors: how a scheduler reaches the worker. Importing this name, or `process`, imports no torch.

Each module has `create(context, on_wait)`, which returns an executor once the worker is ready to serve.
"""
