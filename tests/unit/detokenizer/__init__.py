"""Text streams, stop strings and words, logprobs, clients: without a process."""
