"""Rows of a step: admission, chunks, preemption, batching types, user's own schedulers."""
