"""HTTP itself: connections, heads and bodies, with a bound on everything that is read."""
