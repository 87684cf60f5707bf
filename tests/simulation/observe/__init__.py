"""Statistics, stamps and snapshots of a scheduler that runs, by its own clock."""
