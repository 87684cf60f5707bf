"""capabilities: what rows may want beside a draw, an object each, in the order of docs/sampling.md."""
