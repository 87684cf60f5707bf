"""The launcher with real processes and sockets, without a model. What it does alone: tests/unit/launcher."""
