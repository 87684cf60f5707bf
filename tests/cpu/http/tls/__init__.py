"""Answers and connections of the HTTP server over TLS. Harness: tests/harness/http/tls.py."""
