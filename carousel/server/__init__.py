"""The OpenAI-compatible HTTP server: one more client of the runtime. Knows HTTP and the client library."""
