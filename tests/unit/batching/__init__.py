"""Who is in a step: admission, chunks, preemption, batching types, user's own schedulers."""
