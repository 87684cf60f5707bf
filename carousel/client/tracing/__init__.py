"""Trace context of a request, its phases, and spans of them by its caller's own tracer."""
