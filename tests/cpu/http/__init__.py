"""The HTTP server's protocol, bounds, keys and tenants, over sockets. Harness: tests/harness/http."""
