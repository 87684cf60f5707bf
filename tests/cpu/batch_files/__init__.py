"""The batch command (`carousel-batch`) against a demo launch, and with a runtime of its own."""
