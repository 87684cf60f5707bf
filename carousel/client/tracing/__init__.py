"""Trace context of a request, its phases, and spans for them by the caller's own tracer."""
