"""HTTP itself: connections, heads and bodies, with limits on everything that is read."""
