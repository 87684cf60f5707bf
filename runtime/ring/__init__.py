"""What a process needs to find and join a ring: endpoints, run directory, keys, tenants."""
