"""TLS of the HTTP server: reading, writing and handshakes, in front of the event loop's."""
