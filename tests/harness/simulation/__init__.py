"""The simulation: random traffic through the real scheduler, a hash in place of a model, and its judge."""
