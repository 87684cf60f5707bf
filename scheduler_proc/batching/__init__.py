"""Choice of the requests of the next step: admission, chunks of prompts, preemption."""
