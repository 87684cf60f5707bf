"""The ring as a process finds and joins it: endpoints, run directory, keys, tenants."""
