"""Parts of the scheduler that run without the others. All of it, turn by turn: tests/simulation."""
