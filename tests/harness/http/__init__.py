"""HTTP fronts and clients: a server without a ring, bad bodies, TLS, collectors of traces."""
