"""Messages, transport, status page, run directory, keys, settings."""
