"""State of a request: what has arrived of each sequence, and what its caller has received."""
