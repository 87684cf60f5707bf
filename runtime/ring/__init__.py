"""Names, keys and files that a process needs to find and join a ring: endpoints, run directory, keys, tenants."""
