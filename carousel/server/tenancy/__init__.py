"""API keys, and the entrance of an HTTP process."""
