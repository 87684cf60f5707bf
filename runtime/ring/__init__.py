"""Names, keys and files with which a process finds and joins a ring."""
