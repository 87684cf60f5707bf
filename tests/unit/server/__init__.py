"""The HTTP server's parts: bodies, fields, tenants, metrics: without a socket where it can be."""
