"""API keys, and how their holders divide what an HTTP process has."""
