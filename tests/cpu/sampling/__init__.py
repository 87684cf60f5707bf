"""The sampler against a reference that is written for clarity. A capability gets a file."""
